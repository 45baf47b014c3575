"""Routes and parked models: a flip waits for a wake, and what is parked still answers."""

from __future__ import annotations

import msgspec
import pytest
from site_documents import model, route

from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import DesiredObject, GatewayRecord, GroupRecord, PoolRecord
from gateway.servers.admin_describe import route_statuses
from gateway.state.edits import switch_edit
from gateway.state.route_gate import Readiness, gated
from gateway.state.snapshot import ObjectKey, Observed, Snapshot


def site() -> Snapshot:
    objects = {}
    for document in (model("a"), model("b"), route("chat", "a")):
        key = ObjectKey(document["kind"], document["metadata"]["name"])
        objects[key] = DesiredObject(*key, 1, 1, document, 0.0)
    return Snapshot(1, objects)


def pool(**states: str) -> PoolRecord:
    groups = tuple(GroupRecord(name, 1, 1, (0,), 1, 1, state, residency=state) for name, state in states.items())  # type: ignore[arg-type]
    return PoolRecord("p", "e", "i", "n", 1, "cpu", 1, 1, 0.0, groups=groups)


def flip(record: PoolRecord) -> None:
    gated(lambda snapshot: switch_edit(snapshot, "chat", "b"), Readiness([record]), explicit=True)(site())


def test_a_route_does_not_flip_to_a_parked_target() -> None:
    """Rule 8: after the flip everybody would wait for its wake; the refusal says what to do first."""
    with pytest.raises(
        YardError, match=r"has 1 ready worker group.*`b`: parked in pool `p`; first `yard wake b`, or use --force"
    ) as no:
        flip(pool(a="ready", b="parked"))
    assert no.value.code is ErrorCode.CONFLICT
    waking = pool(a="ready", b="parked")
    groups = (waking.groups[0], msgspec.structs.replace(waking.groups[1], residency="waking"))
    with pytest.raises(YardError, match=r"`b`: waking in pool `p`.*wait until it is ready") as soon:
        flip(msgspec.structs.replace(waking, groups=groups))
    assert soon.value.code is ErrorCode.UNAVAILABLE
    flip(pool(a="ready", b="ready"))


def test_a_route_to_a_parked_model_can_answer() -> None:
    """Rule 6: the first request wakes it."""
    for state, ready in (("parked", True), ("loading", False)):
        (status,) = route_statuses(site(), Observed({"p": pool(a=state)}, {}, None))
        assert status.ready is ready


def test_a_server_that_runs_elsewhere_is_enough_when_a_gateway_reaches_it() -> None:
    """Rule 8: how much it can do is not known here, so it counts as whatever is there now."""
    groups = tuple(GroupRecord("a", 1, index, (index,), 1, 1, "ready") for index in range(2))
    pools = [PoolRecord("p", "e", "i", "n", 1, "cpu", 1, 1, 0.0, groups=groups)]

    def switch(state: str) -> None:
        server = GroupRecord("b", 1, 0, (), 0, 0, state, "refused")  # type: ignore[arg-type]
        gateways = [GatewayRecord("g", "n", 1, "", "", 1, 0.0, servers=(server,))]
        gated(lambda snapshot: switch_edit(snapshot, "chat", "b"), Readiness(pools, gateways), explicit=True)(site())

    switch("ready")
    with pytest.raises(YardError, match=r"`b`: its server is failed \(refused\)"):
        switch("failed")
