from __future__ import annotations

import pytest
from redis.exceptions import ResponseError
from site_documents import model, pool, route, tenant

from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import DesiredObject
from gateway.state.connection import refused
from gateway.state.edits import Put, apply_edit, delete_edit
from gateway.state.snapshot import ObjectKey, Snapshot, newest


def snapshot_of(*documents: dict, revision: int = 1, generation: int = 1) -> Snapshot:
    objects = {}
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        objects[ObjectKey(kind, name)] = DesiredObject(kind, name, generation, revision, document, 0.0)
    return Snapshot(revision, objects)


SITE = snapshot_of(pool("p"), model("m"), model("n"), route("chat", "m", aliases=["talk"]))


@pytest.mark.parametrize(
    ("documents", "field", "message"),
    [
        ([model("chat")], "Model/chat: metadata.name", "the name 'chat' is taken by Route/chat"),
        ([model("talk")], "Model/talk: metadata.name", "'talk' is taken by an alias of Route/chat"),
        ([route("m", "m")], "Route/m: metadata.name", "'m' is taken by Model/m"),
        ([route("r", "m", aliases=["talk"])], "Route/r: spec.aliases", "'talk' is taken by an alias of Route/chat"),
        ([route("r", "m", aliases=["r"])], "Route/r: metadata.name", "'r' is taken by an alias of Route/r"),
        ([route("r", "m", aliases=["x", "x"])], "Route/r: spec.aliases", "'x' is taken by an alias of Route/r"),
        ([route("r", "m", aliases=["x"]), route("s", "m", aliases=["x"])], "Route/r: spec.aliases", "'x' is taken"),
        ([model("x"), model("x")], "Model/x: metadata.name", "given twice in one change"),
        ([route("r", "ghost")], "Route/r: spec.targets", "Model 'ghost' does not exist; apply Model/ghost .* one of: m, n"),
        ([model("x", pools=["q"])], "Model/x: spec.pools", "Pool 'q' does not exist; .* one of: p"),
        ([tenant("t", routes=["nowhere"])], "Tenant/t: spec.routes", "Route 'nowhere' does not exist"),
        ([model("x", replica=2)], "spec.replica", "unknown key.*did you mean 'replicas'"),
    ],
)
def test_rule_14_each_error_names_its_field_and_the_fix(documents: list[dict], field: str, message: str) -> None:
    """Rule 14: unknown keys, duplicates and alias collisions are errors."""
    with pytest.raises(YardError, match=message) as caught:
        apply_edit(SITE, [Put(document) for document in documents])
    assert caught.value.field == field


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(YardError) as caught:
        apply_edit(SITE, [Put(route("r", "ghost")), Put(model("x", pools=["q"]))])
    assert "ghost" in caught.value.message
    assert "Pool 'q'" in caught.value.message


def test_targets_and_pools_may_come_in_the_same_change() -> None:
    writes = apply_edit(Snapshot(), [Put(route("r", "m")), Put(model("m", pools=["p"])), Put(pool("p"))])
    assert [write.action for write in writes] == ["created", "created", "created"]


def test_an_alias_may_move_from_one_route_to_another_in_one_change() -> None:
    writes = apply_edit(SITE, [Put(route("chat", "m")), Put(route("r", "n", aliases=["talk"]))])
    assert [write.action for write in writes] == ["changed", "created"]


def test_a_site_document_is_refused_with_the_reason() -> None:
    site = {"apiVersion": "modelyard/v1", "kind": "Site", "metadata": {"name": "s"}, "spec": {}}
    with pytest.raises(YardError, match="read from the site directory"):
        apply_edit(SITE, [Put(site)])


def test_rule_12_the_higher_generation_wins_deletions_included() -> None:
    """Rule 12: a store that comes back without its latest writes does not turn routes back or bring deleted ones to life."""
    held = snapshot_of(model("m"), route("kept", "m"), revision=9, generation=5)
    held = Snapshot(9, held.objects, {ObjectKey("Route", "ghost"): 4})
    stored = snapshot_of(route("kept", "n"), route("ghost", "n"), route("new", "m"), revision=3, generation=3)
    merged = newest(held, stored)
    assert merged.objects[ObjectKey("Route", "kept")].generation == 5
    assert ObjectKey("Route", "ghost") not in merged.objects
    assert merged.objects[ObjectKey("Route", "new")].generation == 3
    assert ObjectKey("Model", "m") in merged.objects
    assert merged.revision == 9


def test_a_store_that_lost_nothing_is_the_truth() -> None:
    held = snapshot_of(route("r", "m"), revision=4, generation=2)
    stored = Snapshot(5, {}, {ObjectKey("Route", "r"): 3})
    assert newest(held, stored) is stored


def test_the_last_pool_is_not_deleted_from_under_its_models() -> None:
    with pytest.raises(YardError, match=r"Pool/p is the last pool, and Model/m, Model/n would have no place.*--force") as caught:
        delete_edit(SITE, ObjectKey("Pool", "p"))
    assert caught.value.code is ErrorCode.CONFLICT
    assert delete_edit(SITE, ObjectKey("Pool", "p"), force=True)
    beside_another = snapshot_of(pool("p"), pool("q"), model("m"))
    assert delete_edit(beside_another, ObjectKey("Pool", "p"))


def test_a_store_with_a_full_disk_is_told_from_one_that_refuses() -> None:
    full = refused(ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), "the change")
    assert full.code is ErrorCode.EXHAUSTED
    assert "disk" in full.message
    assert (
        refused(ResponseError("READONLY You can't write against a read only replica."), "the change").code
        is ErrorCode.UNAVAILABLE
    )
