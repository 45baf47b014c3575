"""When a starting site counts as up, as under way, or as failed."""

from __future__ import annotations

import msgspec

from gateway.api.config import PoolSpec
from gateway.api.records import (
    ControllerRecord,
    DesiredObject,
    GatewayRecord,
    GroupRecord,
    PoolRecord,
    RankRecord,
    RouteStatus,
    SiteStatus,
)
from gateway.site.readiness import FailureWatch, judge
from gateway.site.summary import summarize

POOLS = {"local": PoolSpec(devices=2, memory=1 << 30)}


def rank(index: int, alive: bool = True) -> RankRecord:
    return RankRecord(index=index, node="n", pid=1, device="cpu", capacity_bytes=1 << 30, alive=alive)


def group(state: str, generation: int = 1, progress: float = 0.0, reason: str = "") -> GroupRecord:
    return GroupRecord(
        model="m", generation=generation, group=1, ranks=(0,), tensor_parallel=1, pipeline_parallel=1,
        state=state, progress=progress, reason=reason,  # type: ignore[arg-type]
    )  # fmt: skip


def status(
    *groups: GroupRecord, ranks: int = 2, generation: int = 1, unplaced: dict[str, tuple[str, ...]] | None = None
) -> SiteStatus:
    pool = PoolRecord(
        pool="local", endpoint="", incarnation="a", node="n", pid=1, device="cpu", fence=1, revision=1, heartbeat_unix=0.0,
        ranks=tuple(rank(index) for index in range(ranks)), groups=groups,
    )  # fmt: skip
    model = DesiredObject(kind="Model", name="m", generation=generation, revision=1, manifest={"spec": {}}, updated_unix=0.0)
    controller = ControllerRecord(owner="c", fence=1, pid=1, heartbeat_unix=0.0, unplaced=unplaced or {})
    route = RouteStatus(
        name="chat", generation=1, targets=(("m", 100),), aliases=(), ready=any(g.state == "ready" for g in groups)
    )
    return SiteStatus(
        site="local", revision=1, redis="ok", pools=(pool,), gateways=(), controller=controller, models=(model,), routes=(route,)
    )  # fmt: skip


def test_up_when_all_ranks_live_and_every_model_has_its_groups():
    judged = judge(status(group("ready")), POOLS, {"m": 1})
    assert judged.is_ready
    assert not judge(status(group("ready")), POOLS, {"m": 2}).is_ready


def test_a_missing_rank_is_not_up():
    judged = judge(status(group("ready"), ranks=1), POOLS, {"m": 1})
    assert not judged.is_ready
    assert judged.lines[0].note == "1 of 2 ranks"


def test_a_loading_model_shows_how_far_it_is():
    [_, line] = judge(status(group("loading", progress=0.4)), POOLS, {"m": 1}).lines
    assert (line.note, line.fraction, line.is_done) == ("loading 40%", 0.4, False)


def test_a_group_of_an_older_generation_does_not_count():
    assert not judge(status(group("ready", generation=1), generation=2), POOLS, {"m": 1}).is_ready


def test_a_failed_group_gives_its_reason():
    judged = judge(status(group("failed", reason="canary answered 'Rome'")), POOLS, {"m": 1})
    assert judged.failures == {"m": "model m: canary answered 'Rome'"}


def test_a_model_without_a_place_is_a_failure_only_once_the_ranks_are_there():
    unplaced = {"m": ("pool local rank 0: needs 9 GiB, 3 GiB free",)}
    assert judge(status(ranks=1, unplaced=unplaced), POOLS, {"m": 1}).failures == {}
    judged = judge(status(unplaced=unplaced), POOLS, {"m": 1})
    assert judged.failures == {"m": "model m has no place: pool local rank 0: needs 9 GiB, 3 GiB free"}


def test_a_failure_is_final_when_it_lasts():
    watch = FailureWatch(grace_s=5.0)
    assert watch.final({"m": "lost a rank"}, 10.0) == []
    assert watch.final({"m": "lost a rank"}, 14.9) == []
    assert watch.final({"m": "lost a rank"}, 15.0) == ["lost a rank"]


def test_a_failure_that_healed_counts_from_anew():
    watch = FailureWatch(grace_s=5.0)
    watch.final({"m": "lost a rank"}, 10.0)
    watch.final({}, 12.0)
    assert watch.final({"m": "lost a rank"}, 16.0) == []


def test_a_failure_is_final_when_a_second_attempt_fails():
    watch = FailureWatch(grace_s=5.0)
    assert watch.final({"m": "no (attempt 1)", "n": "no (attempt 1)"}, 10.0) == []
    watch.final({}, 10.5)
    assert watch.final({"m": "no (attempt 2)", "n": "no (attempt 1)"}, 11.0) == ["no (attempt 2)"]


def test_a_model_with_no_replicas_wanted_is_up_at_once():
    assert judge(status(), POOLS, {"m": 0}).is_ready


def test_summary_of_a_ready_and_of_a_broken_site():
    ready = summarize(status(group("ready")))
    assert ready.is_ready
    assert ready.line.startswith("site local revision 1: ready")
    broken = summarize(status(group("failed")))
    assert broken.problems == ("model m has 0 of 1 groups ready", "route chat cannot answer")


def test_a_server_that_runs_elsewhere_counts_as_its_gateways_find_it() -> None:
    source = {"spec": {"source": "openai+http://trt:8000/v1#llama"}}
    far = DesiredObject("Model", "far", 1, 1, source, 0.0)

    def site(*states: str) -> SiteStatus:
        groups = [GroupRecord("far", 1, 0, (), 0, 0, state, "" if state == "ready" else "refused") for state in states]  # type: ignore[arg-type]
        found = [GatewayRecord(f"g{i}", "n", 1, "", "", 1, 0.0, servers=(group,)) for i, group in enumerate(groups)]
        return msgspec.structs.replace(status(group("ready")), gateways=tuple(found), models=(*status().models, far))

    assert summarize(site("ready")).is_ready
    assert summarize(site("failed", "ready")).is_ready
    assert summarize(site("failed")).problems == ("model far does not answer: refused",)
    assert summarize(site()).problems == ("model far does not answer: no gateway has looked at it yet",)
