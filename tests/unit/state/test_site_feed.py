from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from site_documents import model, route
from valkey_server import ValkeyServer
from watching import until

from gateway.api.records import HEARTBEAT_TTL_S, Keys, PoolRecord
from gateway.state.edits import Put
from gateway.state.feed import SiteFeed
from gateway.state.snapshot import ObjectKey
from gateway.state.store import SiteStore
from gateway.state.view import SiteView


class Watched:
    """A store, and a view that a feed keeps up to date."""

    def __init__(self, url: str, site: str) -> None:
        self.store = SiteStore(url, site)
        self.view = SiteView()
        self._task = asyncio.create_task(SiteFeed(self.view, self.store).run())

    async def until(self, condition: Callable[[SiteView], bool], timeout_s: float = 20.0) -> None:
        await until(self.view, condition, timeout_s)

    async def apply(self, *documents: dict) -> None:
        await self.store.apply([Put(document) for document in documents], "ann")

    async def close(self) -> None:
        assert not self._task.done(), "the feed must survive everything"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.store.close()


@pytest.fixture
async def watched(valkey: ValkeyServer, site: str) -> AsyncIterator[Watched]:
    opened = Watched(valkey.url, site)
    await opened.view.wait_synced()
    yield opened
    await opened.close()


@pytest.fixture
async def fragile(own_valkey: ValkeyServer, site: str) -> AsyncIterator[Watched]:
    """Like `watched`, on a Valkey that the test may stop."""
    opened = Watched(own_valkey.url, site)
    await opened.until(lambda view: not view.degraded)
    yield opened
    await opened.close()


def record(pool: str, revision: int = 0) -> PoolRecord:
    return PoolRecord(pool, "127.0.0.1:1", "i1", "node", 1, "cpu", 1, revision, 0.0)


async def heartbeat(store: SiteStore, pool: PoolRecord, ttl_s: float = HEARTBEAT_TTL_S, *, announce: bool = True) -> None:
    await store.redis.set(store.keys.pool(pool.pool), msgspec.json.encode(pool), px=int(ttl_s * 1000))
    await store.redis.sadd(store.keys.pools, pool.pool)
    if announce:
        await store.redis.publish(store.keys.observed, f"pool:{pool.pool}")


async def test_a_change_reaches_the_view_and_its_subscribers(watched: Watched) -> None:
    await watched.apply(model("m"), route("r", "m", aliases=["s"]))
    await watched.until(lambda view: "r" in view.routes)
    entry = watched.view.resolve("s")
    assert entry is not None
    assert (entry.name, entry.generation, entry.targets) == ("r", 1, (("m", 100),))
    implicit = watched.view.resolve("m")
    assert implicit is not None
    assert implicit.implicit
    await watched.store.delete("Route", "r", actor="ann")
    await watched.until(lambda view: "r" not in view.routes)
    assert watched.view.resolve("s") is None


async def test_rule_13_a_lost_announcement_is_repaired(watched: Watched) -> None:
    """Rule 13: no missing route and no ghost route, although nobody hears of the changes."""
    await watched.apply(model("m"), route("ghost", "m"))
    await watched.until(lambda view: "ghost" in view.routes)
    watched.store.keys.changes = "nobody listens here"
    await watched.apply(route("r", "m"))
    await watched.store.delete("Route", "ghost", actor="ann")
    await watched.until(lambda view: "r" in view.routes and "ghost" not in view.routes)


async def test_an_announcement_that_makes_no_sense_does_no_harm(watched: Watched) -> None:
    await watched.store.redis.publish(watched.store.keys.changes, b"\x00 not a number".decode())
    await watched.apply(model("m"))
    await watched.until(lambda view: "m" in view.models)


async def test_an_object_of_a_newer_version_leaves_what_was_served_before(watched: Watched) -> None:
    await watched.apply(model("m"))
    await watched.until(lambda view: "m" in view.models)
    stored = await watched.store.get("Model", "m")
    assert stored is not None
    strange = msgspec.structs.replace(stored, generation=2, manifest={**stored.manifest, "apiVersion": "modelyard/v9"})
    await watched.store.redis.hset(watched.store.keys.desired("Model"), "m", msgspec.json.encode(strange))
    await watched.store.redis.incr(watched.store.keys.revision)
    await watched.until(lambda view: bool(view.rejected))
    assert watched.view.models["m"].generation == 1
    assert "modelyard/v" in watched.view.rejected[ObjectKey("Model", "m")]
    await watched.apply(model("m", replicas=2))
    await watched.until(lambda view: view.models["m"].generation == 3)
    assert not watched.view.rejected


async def test_a_heartbeat_is_seen_at_once_and_missed_when_it_expires(watched: Watched) -> None:
    await heartbeat(watched.store, record("a"), 0.5)
    await watched.until(lambda view: "a" in view.pools, 0.5)
    await watched.until(lambda view: "a" not in view.pools)
    await watched.store.observed()
    assert not await watched.store.redis.sismember(watched.store.keys.pools, "a")


async def test_rule_13_a_lost_heartbeat_announcement_is_repaired(watched: Watched) -> None:
    """Rule 13, of observed state."""
    await heartbeat(watched.store, record("a"), announce=False)
    await watched.until(lambda view: "a" in view.pools)


@pytest.mark.parametrize("how", ["stopped", "hanging"])
async def test_rule_12_known_routes_stay_without_redis(fragile: Watched, own_valkey: ValkeyServer, how: str) -> None:
    """Rule 12: without Redis the last snapshot stays, pools included, marked degraded; after it, changes arrive again."""
    await fragile.apply(model("m"), route("r", "m"))
    await heartbeat(fragile.store, record("a"), 1.0)
    await fragile.until(lambda view: "r" in view.routes and "a" in view.pools)
    if how == "stopped":
        own_valkey.stop()
    else:
        own_valkey.pause()
    await fragile.until(lambda view: view.degraded)
    assert fragile.view.degraded_reason
    assert fragile.view.resolve("r") is not None
    assert "a" in fragile.view.pools
    if how == "stopped":
        own_valkey.start()
    else:
        own_valkey.resume()
    await fragile.until(lambda view: not view.degraded)
    assert "a" in fragile.view.pools, "its sender is only coming back as well"
    await fragile.apply(route("s", "m"))
    await fragile.until(lambda view: "s" in view.routes)
    await fragile.until(lambda view: "a" not in view.pools)


async def test_rule_12_what_a_flushed_store_forgot_is_given_back(fragile: Watched) -> None:
    """Rule 12: on return the higher generation wins, and the store gets it back, also the deletions."""
    await fragile.apply(model("m"), route("r", "m"), route("ghost", "m"))
    await fragile.apply(route("r", "m", aliases=["s"]))
    await fragile.store.delete("Route", "ghost", actor="ann")
    await fragile.until(lambda view: view.revision == 3)
    await fragile.store.redis.flushall()
    # Somebody writes into the empty store before anybody has noticed.
    await fragile.apply(model("other"))
    await fragile.until(lambda view: "other" in view.models and view.revision > 3)
    stored = await fragile.store.snapshot()
    assert stored.objects[ObjectKey("Route", "r")].generation == 2
    assert stored.tombstones == {ObjectKey("Route", "ghost"): 2}
    assert {key.name for key in stored.objects} == {"m", "r", "other"}
    assert fragile.view.routes["r"].aliases == ("s",)


async def test_rule_12_two_processes_give_back_what_each_saw_last(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12: whichever comes first, in the end both and the store agree on the highest generations."""
    store = SiteStore(own_valkey.url, site)
    await store.apply([Put(model("m"))], "ann")
    older = await store.snapshot()
    await store.apply([Put(model("m", replicas=2)), Put(model("n"))], "ann")
    newer = await store.snapshot()
    for first, second in ((older, newer), (newer, older)):
        await store.redis.flushall()
        for held in (first, second):
            await store.restore(held, await store.snapshot(), "feed")
        assert (await store.snapshot()).objects == newer.objects
    assert (await store.redis.xrevrange(Keys(site).audit, count=1))[0][1][b"action"] == b"restored"
    await store.close()


async def test_a_subscriber_that_fails_stops_neither_the_feed_nor_the_others(watched: Watched) -> None:
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def broken() -> None:
        raise RuntimeError("a bug")

    watched.view.subscribe(broken)
    seen = []
    watched.view.subscribe(lambda: seen.append(watched.view.revision))
    await watched.apply(model("m"))
    await watched.until(lambda view: "m" in view.models)
    assert seen[-1] == 1
    assert isinstance(failures[0], RuntimeError)
