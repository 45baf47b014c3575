from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from site_documents import model, route
from valkey_server import ValkeyServer
from watching import until

from gateway.api.records import HEARTBEAT_TTL_S, Keys, PoolRecord
from gateway.api.tasks import cancelled
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
        await cancelled([self._task])
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


async def test_rule_12_a_store_that_takes_no_writes_loses_no_pool(fragile: Watched) -> None:
    """As with a full disk: it answers reads, and the heartbeats in it expire because nobody can send new ones."""
    await heartbeat(fragile.store, record("p"), ttl_s=3.0)
    await fragile.until(lambda view: "p" in view.pools)
    await fragile.store.redis.config_set("min-replicas-to-write", 1)
    await fragile.until(lambda view: view.degraded)
    assert "takes no writes" in fragile.view.degraded_reason
    await asyncio.sleep(4.5)
    assert (await fragile.store.observed()).pools == {}
    assert "p" in fragile.view.pools
    await fragile.store.redis.config_set("min-replicas-to-write", 0)
    await fragile.until(lambda view: not view.degraded)
    await heartbeat(fragile.store, record("p", revision=1))
    await fragile.until(lambda view: view.pools["p"].revision == 1)


async def test_rule_12_what_a_store_forgot_is_given_back(fragile: Watched) -> None:
    """Rule 12: after a failover to a replica that lagged, or an old copy, the higher generation wins, deletions too."""
    await fragile.apply(model("m"), route("r", "m"), route("ghost", "m"))
    await fragile.until(lambda view: view.revision == 1)
    old = await dump(fragile.store)
    await fragile.apply(route("r", "m", aliases=["s"]))
    await fragile.store.delete("Route", "ghost", actor="ann")
    await fragile.until(lambda view: view.revision == 3)
    await load(fragile.store, old)
    # Somebody writes into the older store before anybody has noticed.
    await fragile.apply(model("other"))
    await fragile.until(lambda view: "other" in view.models and view.revision > 3)
    stored = await fragile.store.snapshot()
    assert stored.objects[ObjectKey("Route", "r")].generation == 2
    assert stored.tombstones == {ObjectKey("Route", "ghost"): 2}
    assert {key.name for key in stored.objects} == {"m", "r", "other"}
    assert fragile.view.routes["r"].aliases == ("s",)
    assert not fragile.view.degraded


async def test_rule_12_a_flushed_store_gets_nothing_back_by_itself(fragile: Watched) -> None:
    """Rule 12: what was served is served on, degraded, until somebody restores it; then all of it is back."""
    await fragile.apply(model("m"), route("r", "m"))
    await fragile.apply(route("r", "m", aliases=["s"]))
    await fragile.until(lambda view: view.revision == 2)
    await fragile.store.redis.flushall()
    await fragile.until(lambda view: view.replaced)
    assert fragile.view.degraded
    assert "yard restore" in fragile.view.degraded_reason
    assert fragile.view.resolve("s") is not None
    # Pools are still seen, and nothing was written.
    await heartbeat(fragile.store, record("a"))
    await fragile.until(lambda view: "a" in view.pools)
    assert (await fragile.store.snapshot()).objects == {}
    assert await fragile.store.restore(fragile.view.desired, "ann") == 2
    await fragile.until(lambda view: not view.degraded)
    assert (await fragile.store.snapshot()).objects[ObjectKey("Route", "r")].generation == 2
    await fragile.apply(route("t", "m"))
    await fragile.until(lambda view: "t" in view.routes)


async def test_a_store_that_was_begun_anew_is_not_mixed_with_the_old(
    fragile: Watched, own_valkey: ValkeyServer, site: str
) -> None:
    """Somebody who knows nothing of the old state writes first, up to the same revision. Here it is then taken as it is."""
    await fragile.apply(model("m"), route("r", "m"))
    await fragile.until(lambda view: "r" in view.routes)
    second = Watched(own_valkey.url, site)
    await second.until(lambda view: "r" in view.routes)
    await fragile.store.redis.flushall()
    await fragile.apply(model("fresh"))
    for watched in (fragile, second):
        await watched.until(lambda view: view.replaced)
        assert set(watched.view.models) == {"m"}
    await fragile.store.give_up(fragile.view.desired, "ann")
    for watched in (fragile, second):
        await watched.until(lambda view: not view.degraded)
        assert set(watched.view.models) == {"fresh"}
        assert watched.view.routes == {}
    await second.close()


async def test_restored_into_a_store_that_was_begun_anew(fragile: Watched) -> None:
    await fragile.apply(model("m"), route("r", "m"))
    await fragile.until(lambda view: "r" in view.routes)
    await fragile.store.redis.flushall()
    await fragile.apply(model("fresh"))
    newcomer = SiteView()
    await fragile.until(lambda view: view.replaced)
    await fragile.store.restore(fragile.view.desired, "ann")
    await fragile.until(lambda view: not view.degraded and "fresh" in view.models and "r" in view.routes)
    newcomer.apply_desired(await fragile.store.snapshot())
    assert set(newcomer.models) == {"m", "fresh"}


async def test_rule_12_two_processes_give_back_what_each_saw_last(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12: whichever comes first, in the end both and the store agree on the highest generations."""
    store = SiteStore(own_valkey.url, site)
    await store.apply([Put(model("k"))], "ann")
    oldest = await dump(store)
    await store.apply([Put(model("m"))], "ann")
    older = await store.snapshot()
    await store.apply([Put(model("m", replicas=2)), Put(model("n"))], "ann")
    newer = await store.snapshot()
    for first, second in ((older, newer), (newer, older)):
        await load(store, oldest)
        for held in (first, second):
            await store.give_back(held, await store.snapshot(), "feed")
        assert (await store.snapshot()).objects == newer.objects
    assert (await store.redis.xrevrange(Keys(site).audit, count=1))[0][1][b"action"] == b"restored"
    await load(store, oldest)
    seen = await store.snapshot()
    await store.redis.flushall()
    assert await store.give_back(newer, seen, "feed") == 0, "it was flushed between the look and the writing"
    await store.close()


async def test_rule_12_a_failover_to_a_replica_that_lost_the_last_write(tmp_path: Path, site: str) -> None:
    """Rule 12 and 13: the address leads to the old replica now; its last write comes back, and all goes on."""
    servers = []
    for name in ("master", "replica"):
        (tmp_path / name).mkdir()
        servers.append(ValkeyServer(tmp_path / name))
        servers[-1].start()
    master, replica = servers
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        address = await stack.enter_async_context(moving_address(master))
        watched = Watched(address.url, site)
        stack.push_async_callback(watched.close)
        follower = await stack.enter_async_context(Redis.from_url(replica.url))
        await watched.apply(model("m"), route("r", "m"))
        await follower.replicaof("127.0.0.1", master.port)  # type: ignore[misc]
        async with asyncio.timeout(20):
            while await follower.get(Keys(site).revision) != b"1":  # noqa: ASYNC110 - replication announces itself nowhere
                await asyncio.sleep(0.02)
        await follower.replicaof("NO", "ONE")  # type: ignore[misc]
        await watched.apply(route("r", "m", aliases=["late"]))
        await watched.until(lambda view: "late" in view.aliases)
        address.port = replica.port
        master.stop()
        await watched.until(lambda view: view.degraded)
        assert watched.view.resolve("late") is not None
        await watched.until(lambda view: not view.degraded)
        assert (await watched.store.snapshot()).objects[ObjectKey("Route", "r")].generation == 2
        await watched.apply(route("t", "m"))
        await watched.until(lambda view: "t" in view.routes)


async def test_rule_12_a_slow_redis_only_makes_changes_slow(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12: 150 ms a call: the view stays, changes arrive, nothing is degraded."""
    async with moving_address(own_valkey) as address:
        watched = Watched(address.url, site)
        await watched.apply(model("m"), route("r", "m"))
        await watched.until(lambda view: "r" in view.routes and not view.degraded)
        address.delay_s = 0.15
        degraded = []
        watched.view.subscribe(lambda: degraded.append(watched.view.degraded))
        await watched.apply(route("s", "m"))
        await watched.until(lambda view: "s" in view.routes)
        assert not any(degraded)
        await watched.close()


class MovingAddress:
    """A TCP address that leads to a server, with a delay, or another server later."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.delay_s = 0.0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s / 2)
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def moving_address(server: ValkeyServer) -> AsyncIterator[MovingAddress]:
    address = MovingAddress(server.port)
    listener = await asyncio.start_server(address.serve, "127.0.0.1", 0)
    address.url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
    try:
        yield address
    finally:
        listener.close()


async def dump(store: SiteStore) -> dict[bytes, bytes]:
    """An old copy of everything."""
    return {key: await store.redis.dump(key) for key in await store.redis.keys()}


async def load(store: SiteStore, copy: dict[bytes, bytes]) -> None:
    await store.redis.flushall()
    for key, value in copy.items():
        await store.redis.restore(key, 0, value)


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
