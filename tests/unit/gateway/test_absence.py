"""What a request is told while the pool of its model starts, or starts again."""

from __future__ import annotations

import msgspec

from gateway.api.records import ControllerRecord, DesiredObject, GroupRecord, PoolRecord, RankRecord
from gateway.servers.absence import why_absent
from gateway.state.ranks_away import ranks_away
from gateway.state.snapshot import ObjectKey, Observed, Snapshot
from gateway.state.view import SiteView

POOL = PoolRecord("a", "", "i", "n", 1, "cpu", 1, 1, 0.0, ranks=(RankRecord(0, "n", 1, "cpu", 1),))
AWAY = msgspec.structs.replace(
    POOL,
    message="rank 0 (pid 1) is gone",
    ranks=(RankRecord(0, "n", 0, "cpu", 1, alive=False),),
    groups=(GroupRecord("m", 1, 1, (0,), 1, 1, "waiting"),),
)


def view(*pools: PoolRecord, unplaced: dict[str, tuple[str, ...]] | None = None) -> SiteView:
    site = SiteView()
    document = {"apiVersion": "modelyard/v1", "kind": "Pool", "metadata": {"name": "a"}, "spec": {"devices": 1, "memory": "1GiB"}}
    site.apply_desired(Snapshot(1, {ObjectKey("Pool", "a"): DesiredObject("Pool", "a", 1, 1, document, 0.0)}))
    controller = ControllerRecord("c", 1, 1, 0.0, unplaced=unplaced or {})
    site.apply_observed(Observed({pool.pool: pool for pool in pools}, {}, controller))
    return site


def test_a_pool_whose_driver_is_not_heard_is_named_and_said_to_restart():
    assert "pool `a`, where it was, is restarting" in why_absent(view(), "m", {"a"})
    assert "pool `a`, where it was, has restarted" in why_absent(view(POOL), "m", {"a"})


def test_a_pool_that_was_never_heard_is_starting():
    assert "pool `a` is starting" in why_absent(view(), "m", ())


def test_ranks_that_went_are_said_with_the_cause():
    assert "the ranks of pool `a` are restarting (rank 0 (pid 1) is gone); it is loaded again" in why_absent(view(AWAY), "m", ())


def test_what_has_no_place_says_why():
    assert "too big" in why_absent(view(POOL, unplaced={"m": ("too big",)}), "m", ())


def test_many_ranks_are_said_in_few_words():
    ran, new = RankRecord(0, "n", 0, "cuda", 1, alive=False), RankRecord(0, "", 0, "cuda", 1, alive=False)
    some = [RankRecord(index, "n", 1, "cuda", 1) for index in range(64)]
    for index, kind in ((3, ran), (4, ran), (9, new)):
        some[index] = msgspec.structs.replace(kind, index=index)
    pool = msgspec.structs.replace(POOL, ranks=tuple(some))
    assert ranks_away(pool) == "61 of 64 ranks run, r3-r4 restarting, r9 starting"
    none = msgspec.structs.replace(AWAY, ranks=tuple(msgspec.structs.replace(ran, index=index) for index in range(64)))
    assert ranks_away(none) == "its 64 ranks are restarting (rank 0 (pid 1) is gone)"
    assert ranks_away(POOL) == ""
