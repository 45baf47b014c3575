"""When an upgrade has replaced the processes of one kind."""

from __future__ import annotations

from gateway.api.records import ControllerRecord, GatewayRecord, SiteStatus
from gateway.site.upgrade import gateways_of, is_replaced


def status(*gateways: str, redis: str = "ok") -> SiteStatus:
    records = tuple(
        GatewayRecord(gateway=name, node="n", pid=1, grpc_endpoint="", http_endpoint="", revision=1, heartbeat_unix=0.0)
        for name in gateways
    )
    controller = ControllerRecord(owner="c", fence=1, pid=1, heartbeat_unix=0.0)
    return SiteStatus(
        site="s", revision=1, redis=redis, pools=(), gateways=records, controller=controller, models=(), routes=()  # type: ignore[arg-type]
    )  # fmt: skip


def replaced(before: SiteStatus, now: SiteStatus, wanted: int = 2) -> bool:
    return is_replaced(before, now, gateways_of, wanted)


def test_done_when_all_wanted_are_new():
    assert replaced(status("a", "b"), status("c", "d"))
    assert not replaced(status("a", "b"), status("c", "d", "b"))
    assert not replaced(status("a", "b"), status("c"))


def test_those_that_an_interrupted_upgrade_left_beside_are_not_asked_for_again():
    assert replaced(status("a", "b", "c", "d"), status("e", "f"))
    assert not replaced(status("a", "b", "c", "d"), status("e"))


def test_a_gateway_that_was_missing_before_need_not_come():
    assert replaced(status("a"), status("c"))


def test_a_site_that_was_ready_is_ready_again():
    assert not replaced(status("a"), status("c", redis="degraded"))
    assert replaced(status("a", redis="degraded"), status("c", redis="degraded"))
