"""The controller's decision, event by event (rule 2): values in, values out."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from fleet import GIB, SHAPE, asked, model_spec, pool_spec

from gateway.api.proto.pool_pb2 import Assignment
from gateway.api.records import GroupRecord, PoolRecord, RankRecord
from gateway.controller.decision import decide
from gateway.controller.model_requests import READING, AskedModel
from gateway.controller.pool_digest import deployment_name
from gateway.controller.situation import (
    LOST_S,
    REASSERT_S,
    REDEPLOY_S,
    Ack,
    AppSight,
    Assign,
    Decision,
    DeletePool,
    DeployPool,
    Desired,
    Observed,
    Placed,
    PoolSight,
)
from gateway.state.view import PoolEntry
from placement.types import PlacedGroup

SPEC = pool_spec()


def record(pool: str = "p", *groups: GroupRecord, ranks: int = 1, capacity: int = 2 * GIB, incarnation: str = "i1") -> PoolRecord:
    devices = tuple(RankRecord(index, f"node-{pool}", 1, "cpu", capacity) for index in range(ranks))
    return PoolRecord(pool, f"{pool}:1", incarnation, f"node-{pool}", 1, "cpu", 1, 1, 0.0, ranks=devices, groups=groups)


def group(model: str = "m", state: str = "ready", rank: int = 0) -> GroupRecord:
    return GroupRecord(model, 1, 1, (rank,), 1, 1, state)  # type: ignore[arg-type]


def desired(*models: str, pools: tuple[str, ...] = ("p",), **spec: object) -> Desired:
    return Desired({name: asked(name, model_spec(**spec)) for name in models}, {name: PoolEntry(SPEC, 1) for name in pools})


def observed(*records: PoolRecord, apps: dict[str, AppSight] | None = None, watching_s: float = 1000.0) -> Observed:
    running = {item.pool: AppSight("RUNNING", deployment_name(SPEC)) for item in records}
    return Observed({item.pool: PoolSight(item) for item in records}, running if apps is None else apps, frozenset(), watching_s)


def placed(*places: tuple[str, str, int]) -> tuple[PlacedGroup, ...]:
    return tuple(PlacedGroup(model, pool, (rank,), 1, 1, (GIB,)) for model, pool, rank in places)


def places(decision: Decision) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(item.model, item.pool, item.ranks) for item in decision.groups]


def assigned(decision: Decision, pool: str = "p") -> list[str]:
    (action,) = (item for item in decision.actions if isinstance(item, Assign) and item.pool == pool)
    return [Assignment.FromString(item).model for item in action.assignments]


def test_the_same_situation_gives_the_same_decision() -> None:
    arguments = (desired("m", "n"), observed(record(ranks=2)), Placed(()))
    assert decide(*arguments) == decide(*arguments)


def test_a_rank_that_died_a_moment_ago_moves_nothing_and_one_that_stays_dead_does() -> None:
    dead = msgspec.structs.replace(record("p"), ranks=(RankRecord(0, "node-p", 1, "cpu", 2 * GIB, alive=False),))
    site = desired("m", pools=("p", "q"))
    seen = observed(dead, record("q"))
    for dead_s, pool in ((1.0, "p"), (LOST_S, "q")):
        sights = {**seen.pools, "p": PoolSight(dead, dead_s={0: dead_s})}
        assert places(decide(site, replace(seen, pools=sights), Placed(placed(("m", "p", 0))))) == [("m", pool, (0,))]


def test_a_pool_out_of_sight_keeps_its_groups_for_a_while() -> None:
    site = desired("m", pools=("p", "q"))
    before = Placed(placed(("m", "p", 0)))
    for watching_s, pool in ((1.0, "p"), (LOST_S, "q")):
        decision = decide(site, observed(record("q"), watching_s=watching_s), before)
        assert places(decision) == [("m", pool, (0,))], "a controller that has just begun cannot know since when"
    missing = observed(record("p"), record("q"))
    for missing_s, pool in ((1.0, "p"), (LOST_S, "q")):
        sights = {**missing.pools, "p": PoolSight(record("p"), missing_s=missing_s)}
        decision = decide(site, replace(missing, pools=sights), before)
        assert places(decision) == [("m", pool, (0,))]
        assert not [item for item in decision.actions if isinstance(item, Assign) and item.pool == "p"]


def test_more_memory_than_a_place_has_moves_the_model_and_less_does_not() -> None:
    before = Placed(placed(("m", "p", 0)))
    seen = observed(record("p", group(), capacity=int(1.3 * GIB)), record("q"))
    assert places(decide(desired("m", pools=("p", "q")), seen, before))[0][1] == "p"
    big = {"m": AskedModel(model_spec(), 2, replace(asked("m", model_spec()).request, kv_floor_bytes=GIB // 2))}  # type: ignore[type-var]
    site = Desired(big, {name: PoolEntry(SPEC, 1) for name in ("p", "q")})
    assert places(decide(site, seen, before))[0][1] == "q"


def with_ledger(*lines: tuple[str, str, int], groups: tuple[GroupRecord, ...] = ()) -> PoolRecord:
    return msgspec.structs.replace(record("p", *groups), ranks=(RankRecord(0, "n", 1, "cpu", 2 * GIB, ledger=lines),))


def test_foreign_memory_and_the_ranks_own_context_count() -> None:
    taken = with_ledger(("device", "foreign", GIB // 2), ("device", "context", GIB // 2))
    decision = decide(desired("m"), observed(taken), Placed(()))
    assert not decision.groups
    assert "1.0 GiB" in " ".join(decision.unplaced["m"])


def test_where_memory_went_that_nobody_knows_of_nothing_comes_and_nothing_leaves() -> None:
    """The driver would refuse what came there; and the figure may have grown by what the model itself does."""
    taken = with_ledger(("device", "workspace", GIB), groups=(group(),))
    assert not decide(desired("m"), observed(with_ledger(("device", "workspace", GIB))), Placed(())).groups
    assert places(decide(desired("m"), observed(taken), Placed(placed(("m", "p", 0))))) == [("m", "p", (0,))]


def test_models_that_take_turns_are_all_assigned_and_stay_where_they_are() -> None:
    """More model bytes than memory: the driver parks and wakes. Nothing moves in the next pass."""
    site = desired("a", "b", "c")
    seen = observed(record(capacity=int(1.5 * GIB)))
    assert len(decide(site, seen, Placed(())).groups) == 1
    site = replace(site, pools={"p": PoolEntry(SPEC.model_copy(update={"standby": 8 * GIB}), 1)})
    first = decide(site, seen, Placed(()))
    assert assigned(first) == ["a", "b", "c"]
    again = decide(site, seen, Placed(first.groups))
    assert (again.groups, again.plan.loads, again.plan.unloads) == (first.groups, (), ())


def test_an_assignment_is_repeated_until_it_is_confirmed_and_once_in_a_while_after() -> None:
    site, seen = desired("m"), observed(record("p", group()))
    first = decide(site, seen, Placed(placed(("m", "p", 0)), fence=3))
    (action,) = (item for item in first.actions if isinstance(item, Assign))
    ack = Ack(action.incarnation, 3, action.assignments)
    for known, repeated in (
        (ack, False),
        (replace(ack, age_s=REASSERT_S), True),
        (replace(ack, fence=2), True),
        (replace(ack, incarnation="i0"), True),
        (replace(ack, assignments=()), True),
    ):
        decision = decide(site, seen, Placed(placed(("m", "p", 0)), acks={"p": known}, fence=3))
        assert bool(decision.actions) == repeated


def test_applications_are_deployed_deleted_and_left_alone() -> None:
    right, wrong = deployment_name(SPEC), deployment_name(pool_spec(devices=5))
    for app, actions in (
        (None, [DeployPool("p")]),
        (AppSight("DEPLOYING", ""), []),  # Serve has just taken it and does not list its deployment yet.
        (AppSight("RUNNING", right), []),
        (AppSight("DELETING", right), []),
        (AppSight("DEPLOY_FAILED", right, age_s=1), []),
        (AppSight("DEPLOY_FAILED", right, age_s=REDEPLOY_S), [DeployPool("p")]),
        (AppSight("RUNNING", wrong), [DeletePool("p")]),
    ):
        seen = observed(apps={"p": app} if app else {})
        assert list(decide(desired(), seen, Placed(())).actions) == actions, app
    not_ours = observed(apps={"p": AppSight("RUNNING", right), "somebodys": AppSight("RUNNING", "")})
    assert not decide(desired(), not_ours, Placed(())).actions


def test_a_closing_pool_takes_no_new_group_and_is_deleted_once_it_holds_none() -> None:
    closing = AppSight("RUNNING", deployment_name(pool_spec(devices=5)))
    seen = observed(record("p", group()), apps={"p": closing})
    decision = decide(desired("m", "n"), seen, Placed(placed(("m", "p", 0))))
    assert not decision.groups
    assert assigned(decision) == []
    assert DeletePool("p") not in decision.actions, "its requests in flight finish first"
    assert DeletePool("p") in decide(desired("m"), observed(record("p"), apps={"p": closing}), Placed(())).actions


def test_a_group_lingers_only_while_its_successor_is_coming_and_its_memory_is_free() -> None:
    site = desired("m", pools=("p", "q"))
    site = replace(site, models={"m": asked("m", model_spec(pools=("q",)))})
    before = Placed(placed(("m", "p", 0)))
    loading = observed(record("p", group()), record("q", group(state="loading")))
    assert {item.pool for item in decide(site, loading, before).groups} == {"p", "q"}
    for state in ("ready", "failed"):
        seen = observed(record("p", group()), record("q", group(state=state)))
        decision = decide(site, seen, Placed((*before.groups, *placed(("m", "q", 0)))))  # type: ignore[misc]
        assert {item.pool for item in decision.groups} == {"q"}, state
    crowded = replace(site, models={**site.models, "n": asked("n", model_spec(pools=("p",)))})
    decision = decide(crowded, loading, before)
    assert places(decision) == [("m", "q", (0,)), ("n", "p", (0,))], "memory that another model needs is not kept"


def test_too_many_replicas_go_at_once() -> None:
    seen = observed(record("p", group(), group(rank=1), ranks=2))
    decision = decide(desired("m"), seen, Placed(placed(("m", "p", 0), ("m", "p", 1))))
    assert places(decision) == [("m", "p", (0,))]


def test_replicas_go_to_pools_of_different_nodes_and_the_rest_says_why_not() -> None:
    site = desired("m", pools=("p", "q"), replicas=3)
    decision = decide(site, observed(record("p"), record("q")), Placed(()))
    assert [item.pool for item in decision.groups] == ["p", "q"]
    assert "2 of 3 replicas are placed" in decision.unplaced["m"][0]
    assert [event.kind for event in decision.events] == ["model.placed", "model.unplaced"]


def test_a_replica_whose_node_is_lost_waits_for_a_device_of_its_own() -> None:
    """Also with room for both: never two on one rank, and the reason says so."""
    site = desired("m", pools=("p", "q"), replicas=2)
    large, other = record("p", group(), capacity=8 * GIB), record("q", group())
    before = Placed(placed(("m", "p", 0), ("m", "q", 0)))
    seen = observed(large, other)
    lost = replace(seen, pools={**seen.pools, "q": PoolSight(other, missing_s=LOST_S)})
    decision = decide(site, lost, before)
    assert places(decision) == [("m", "p", (0,))]
    assert (
        "1 of 2 replicas are placed; for one more: rank 0 of pool `p` holds a replica of it already" in decision.unplaced["m"][0]
    )
    assert "add a device, or ask for fewer replicas" in decision.unplaced["m"][0]
    assert [event.kind for event in decision.events] == ["model.placed", "model.unplaced"]
    again = decide(site, observed(large, record("q")), Placed(decision.groups, decision.refused))
    assert places(again) == [("m", "p", (0,)), ("m", "q", (0,))], "it comes back with the node"


def test_replicas_that_were_put_on_one_rank_are_taken_apart() -> None:
    """What shares a rank with another one serves nothing by lingering there."""
    seen = observed(record("p", group(), ranks=2, capacity=8 * GIB))
    decision = decide(desired("m", replicas=2), seen, Placed(placed(("m", "p", 0), ("m", "p", 0))))
    assert places(decision) == [("m", "p", (0,)), ("m", "p", (1,))]


def test_a_group_lingers_also_below_the_one_that_replaces_it() -> None:
    """Another split of the same device: the old one serves until the new one does."""
    site = desired("m", tensor_parallel=2)
    old, new = group(), GroupRecord("m", 2, 2, (0, 1), 2, 1, "loading")
    first = decide(site, observed(record("p", old, ranks=2, capacity=8 * GIB)), Placed(placed(("m", "p", 0))))
    assert places(first) == [("m", "p", (0,)), ("m", "p", (0, 1))]
    for state, left in (("loading", 2), ("ready", 1)):
        new = msgspec.structs.replace(new, state=state)
        seen = observed(record("p", old, new, ranks=2, capacity=8 * GIB))
        assert len(decide(site, seen, Placed(first.groups)).groups) == left, state


def test_an_event_is_made_only_when_something_changed() -> None:
    site, seen = desired("m", "n"), observed(record("p", group()))
    first = decide(site, seen, Placed(placed(("m", "p", 0))))
    assert [(event.kind, event.subject) for event in first.events] == [("model.unplaced", "Model/n")]
    assert not decide(site, seen, Placed(first.groups, first.refused)).events


def test_a_checkpoint_that_is_being_read_is_no_refusal_yet() -> None:
    site = replace(desired(), models={"m": AskedModel(model_spec(), 1, None, READING)})
    decision = decide(site, observed(record()), Placed(()))
    assert decision.unplaced == {"m": (READING,)}
    assert not decision.events


def test_what_pools_hold_is_adopted_also_before_its_checkpoint_was_read() -> None:
    site = replace(desired(), models={"m": AskedModel(model_spec(), 1, None, READING)})
    decision = decide(site, observed(record("p", group())), Placed(None))
    assert places(decision) == [("m", "p", (0,))]
    later = decide(desired("m"), observed(record("p", group())), Placed(decision.groups))
    assert later.groups[0].bytes_per_rank[0] > sum(SHAPE.layer_bytes)


def test_an_idle_model_moves_for_one_that_fits_nowhere_and_a_busy_one_stays() -> None:
    """Pool p is the only one that `large` may use, and has room for it once `m` has gone to pool q."""
    site = Desired(
        {"m": asked("m", model_spec()), "large": asked("large", model_spec(pools=("p",)))},
        {name: PoolEntry(SPEC, 1) for name in ("p", "q")},
    )
    for running, expected in ((0, [("large", "p", (0,)), ("m", "q", (0,))]), (1, [("m", "p", (0,))])):
        serving = msgspec.structs.replace(group(), running=running)
        seen = observed(record("p", serving), record("q"))
        decision = decide(site, seen, Placed(placed(("m", "p", 0))))
        assert places(decision) == expected
        assert places(decide(site, seen, Placed(decision.groups))) == expected  # and does not move back
        assert ("large" in decision.unplaced) == bool(running)


def test_what_a_plan_promised_is_what_the_controller_does() -> None:
    """The same decision is behind both; it is the same again once the objects are stored."""
    site, seen = desired("m", "n", pools=("p", "q")), observed(record("p", group()), record("q"))
    promised = decide(site, seen, Placed(placed(("m", "p", 0))))
    done = decide(site, seen, Placed(promised.groups))
    assert places(done) == places(promised) == [("m", "p", (0,)), ("n", "q", (0,))]
    assert assigned(promised, "q") == ["n"]


def test_a_card_in_trouble_takes_nothing_and_links_bound_a_tensor_split() -> None:
    """What ranks say of their cards is what placement looks at."""
    linked = [RankRecord(index, "node-p", 1, "cuda", 2 * GIB, type="NVIDIA H200", nvlink_domain=domain)
              for index, domain in enumerate(("a", "b", "b"))]  # fmt: skip
    site = Desired({"m": asked("m", model_spec(tensor_parallel=2))}, {"p": PoolEntry(SPEC, 1)})
    for trouble, expected in (("", [("m", "p", (1, 2))]), ("3 uncorrected memory errors", [])):
        ranks = (*linked[:2], msgspec.structs.replace(linked[2], trouble=trouble))
        seen = observed(msgspec.structs.replace(record("p"), device="cuda", ranks=ranks))
        decision = decide(site, seen, Placed(()))
        assert places(decision) == expected
        assert any(trouble in reason for reason in decision.unplaced.get("m", ())) == (not expected)
    sockets = tuple(msgspec.structs.replace(rank, nvlink_domain="", numa=min(rank.index, 1)) for rank in linked)
    seen = observed(msgspec.structs.replace(record("p"), device="cuda", ranks=sockets))
    assert places(decide(site, seen, Placed(()))) == [("m", "p", (1, 2))]
