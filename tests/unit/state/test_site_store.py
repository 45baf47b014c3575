from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from site_documents import model, pool, route
from valkey_server import ValkeyServer

from gateway.api.errors import ErrorCode, YardError
from gateway.state.edits import Put, Write, delete_edit
from gateway.state.snapshot import ObjectKey, Snapshot
from gateway.state.store import SiteStore


@pytest.fixture
async def store(valkey: ValkeyServer, site: str) -> AsyncIterator[SiteStore]:
    opened = SiteStore(valkey.url, site)
    yield opened
    await opened.close()


async def apply(store: SiteStore, *documents: dict, actor: str = "ann") -> int:
    return (await store.apply([Put(document) for document in documents], actor)).revision


async def test_every_change_bumps_generation_and_revision_and_leaves_an_audit_entry(store: SiteStore) -> None:
    assert await apply(store, pool("a"), model("m")) == 1
    assert await apply(store, model("m", replicas=2), actor="bob") == 2

    stored = await store.get("Model", "m")
    assert stored is not None
    assert (stored.generation, stored.revision, stored.actor) == (2, 2, "bob")
    audit = [fields for _, fields in await store.redis.xrange(store.keys.audit)]
    seen = [(e[b"kind"], e[b"name"], e[b"action"], e[b"actor"], e[b"generation_from"], e[b"generation_to"]) for e in audit]
    assert seen == [
        (b"Pool", b"a", b"created", b"ann", b"0", b"1"),
        (b"Model", b"m", b"created", b"ann", b"0", b"1"),
        (b"Model", b"m", b"changed", b"bob", b"1", b"2"),
    ]
    assert b'"replicas":2' in audit[2][b"to"]
    assert b'"replicas":2' not in audit[2][b"from"]


async def test_the_same_document_in_other_words_writes_nothing(store: SiteStore) -> None:
    await apply(store, pool("a", memory="2GiB"))
    commit = await store.apply([Put(pool("a", memory=2 * 2**30))], "ann")
    assert [write.action for write in commit.writes] == ["unchanged"]
    assert commit.revision == 1


async def test_a_stale_generation_is_a_conflict_that_names_both(store: SiteStore) -> None:
    await apply(store, model("m"))
    await apply(store, model("m", replicas=2), actor="bob")
    with pytest.raises(YardError, match=r"Model/m: generation 1 was given, the store has 2 \(written by bob\)") as caught:
        await store.apply([Put(model("m", replicas=3), generation=1)], "ann")
    assert caught.value.code is ErrorCode.CONFLICT


async def test_all_documents_of_a_change_are_written_or_none(store: SiteStore) -> None:
    await apply(store, model("m"))
    with pytest.raises(YardError, match=r"Route/r: spec\.targets: Model 'ghost' does not exist; apply Model/ghost"):
        await apply(store, pool("a"), model("m", replicas=2), route("r", "ghost"))
    snapshot = await store.snapshot()
    assert snapshot.revision == 1
    assert set(snapshot.objects) == {ObjectKey("Model", "m")}


async def test_rule_1_what_a_change_validated_still_holds_when_it_is_written(valkey: ValkeyServer, site: str) -> None:
    """Rule 1: the read that gates a mutation is inside the writer. A model that a route takes up between the check and
    the write of its deletion is not deleted."""
    store = SiteStore(valkey.url, site)
    await apply(store, model("a"), model("b"), route("r", "a"))
    seen_revisions = []

    async def somebody_else() -> None:
        other = SiteStore(valkey.url, site)
        await apply(other, route("r", "b"))
        await other.close()

    def delete_b(snapshot: Snapshot) -> list[Write]:
        writes = delete_edit(snapshot, ObjectKey("Model", "b"))
        seen_revisions.append(snapshot.revision)
        meanwhile = threading.Thread(target=lambda: asyncio.run(somebody_else()))
        meanwhile.start()
        meanwhile.join()
        return writes

    with pytest.raises(YardError, match="Model/b is still named by Route/r"):
        await store.transact(delete_b, "ann")
    assert seen_revisions == [1]
    assert await store.get("Model", "b") is not None
    await store.close()


async def test_rule_1_concurrent_writers_lose_no_change(store: SiteStore) -> None:
    """Rule 1: every change is compare-and-set, so of ten at once each is there afterwards, in some order."""
    await apply(store, model("m", replicas=0))
    await asyncio.gather(*(apply(store, model("m", replicas=number), actor=f"w{number}") for number in range(1, 11)))
    stored = await store.get("Model", "m")
    assert stored is not None
    assert stored.generation == 11
    audit = await store.redis.xrange(store.keys.audit)
    assert [int(fields[b"generation_to"]) for _, fields in audit] == list(range(1, 12))


async def test_the_script_itself_refuses_a_wrong_generation(store: SiteStore) -> None:
    """A caller with the right revision but a wrong generation (a damaged store) writes nothing."""
    await apply(store, model("m"))
    keys = [store.keys.revision, store.keys.audit, store.keys.tombstones, store.keys.identity, store.keys.desired("Model")]
    args = [1, "channel", "ann", 0, 10, "id", "Model", "m", 7, 8, "{}", "changed"]
    answer = await store._desired_script(keys=keys, args=args)
    assert answer == [b"conflict", b"Model", b"m", 1]
    assert await store.revision() == 1


async def test_a_name_made_again_goes_on_with_its_generations(store: SiteStore) -> None:
    """A driver that still holds generation 1 of a deleted model must not take the new model for it."""
    await apply(store, model("m"))
    await store.delete("Model", "m", actor="ann")
    await apply(store, model("m", replicas=2))
    stored = await store.get("Model", "m")
    assert stored is not None
    assert stored.generation == 3


async def test_deleting_what_others_name_needs_force(store: SiteStore) -> None:
    await apply(store, pool("p"), model("m", pools=["p"]), route("r", "m"))
    for kind, name, user in (("Model", "m", "Route/r"), ("Pool", "p", "Model/m")):
        with pytest.raises(YardError, match=f"{kind}/{name} is still named by {user}"):
            await store.delete(kind, name, actor="ann")
    commit = await store.delete("Model", "m", force=True, actor="ann")
    assert commit.writes[0].action == "deleted"
    assert await store.get("Model", "m") is None
    await apply(store, pool("other"))  # The dangling route does not stand in the way of other changes.


async def test_a_switch_keeps_what_was_before_and_rollback_brings_it_back(store: SiteStore) -> None:
    await apply(store, model("a"), model("b"), route("r", "a", aliases=["s"]))
    await store.switch_route("r", "b", actor="ann")
    switched = await store.get("Route", "r")
    assert switched is not None
    assert switched.manifest["spec"] == {"targets": [{"model": "b", "weight": 100}], "aliases": ["s"]}

    await store.rollback_route("r", actor="ann")
    back = await store.get("Route", "r")
    assert back is not None
    assert back.manifest["spec"] == {"targets": [{"model": "a"}], "aliases": ["s"]}
    assert back.generation == 3

    with pytest.raises(YardError, match="generation 1 was given, the store has 3"):
        await store.switch_route("r", "b", generation=1, actor="ann")
    with pytest.raises(YardError, match="rolled back already"):
        await store.rollback_route("r", actor="ann")


async def test_a_route_never_switched_cannot_be_rolled_back(store: SiteStore) -> None:
    await apply(store, model("a"), route("r", "a"))
    with pytest.raises(YardError, match="never switched"):
        await store.rollback_route("r", actor="ann")


async def test_rule_12_changes_are_refused_without_redis(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12: without Redis, changes are refused, at once and with a time to come back."""
    store = SiteStore(own_valkey.url, site)
    await apply(store, model("m"))
    own_valkey.stop()
    with pytest.raises(YardError, match="changes are refused until it is back") as caught:
        await apply(store, model("m", replicas=2))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.retry_after_s
    own_valkey.start()
    assert await apply(store, model("m", replicas=2)) == 2
    await store.close()


async def test_rule_15_a_hanging_redis_ends_in_an_error_that_admits_the_doubt(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 15: every control call has a deadline; a write that was sent may have been done, and the error says so."""
    store = SiteStore(own_valkey.url, site)
    await apply(store, model("m"))
    own_valkey.pause()
    with pytest.raises(YardError, match="may or may not be done"):
        await apply(store, model("m", replicas=2))
    own_valkey.resume()
    await store.close()
