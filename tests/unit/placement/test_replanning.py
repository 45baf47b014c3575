"""Plans that move idle groups for what fits nowhere, what plans come to, and why groups are where they are."""

from __future__ import annotations

from dataclasses import replace

from sites import GIB, model, node

from placement.changes import changes
from placement.explain import why
from placement.packing import place
from placement.replanning import replan
from placement.types import PlacedGroup, Slo, Snapshot


def _on(name: str, rank: int, gib: float) -> PlacedGroup:
    return PlacedGroup(name, "p", (rank,), 1, 1, (int(gib * GIB),))


def _scattered(**fields: object) -> Snapshot:
    """Two nodes of two: one small model on each has a rank, and the pair that a wide model needs is nowhere whole."""
    devices = node("p", "n", 2, 24) + node("p", "o", 2, 24, first_rank=2)
    models = (
        model("a", 6, **fields),
        model("b", 6, **fields),
        model("wide", 34, tensor_parallel=2, pipeline_parallel=1),
    )
    return Snapshot(devices, models, (_on("a", 0, 8), _on("b", 2, 8)))


def test_an_idle_model_moves_for_one_that_fits_nowhere() -> None:
    snapshot = _scattered()
    assert set(place(snapshot).refusals) == {"wide"}
    plan = replan(snapshot)
    assert not plan.refusals
    (move,) = plan.moves
    assert move.before in snapshot.placed
    assert {group.model for group in plan.loads} == {"wide", move.before.model}
    assert plan.unloads == (move.before,)
    # The plan stands: placed as it says, nothing moves any more.
    assert replan(replace(snapshot, placed=plan.groups)).loads == ()


def test_busy_and_pinned_models_stay() -> None:
    assert set(replan(_scattered(), busy=("a", "b")).refusals) == {"wide"}
    assert set(replan(_scattered(pinned=True)).refusals) == {"wide"}


def test_nothing_moves_without_need() -> None:
    snapshot = _scattered()
    fits = replace(snapshot, models=snapshot.models[:2])
    assert replan(fits) == place(fits)


def test_changes_name_moves_paths_and_times() -> None:
    snapshot = _scattered()
    found = {change.group.model: change for change in changes(snapshot, replan(snapshot))}
    assert found["wide"].action == "load"
    assert found["wide"].path == "load"
    assert found["wide"].bytes == sum(found["wide"].group.bytes_per_rank)
    assert found["wide"].seconds > 5
    moved = next(change for change in found.values() if change.action == "move")
    assert moved.before in snapshot.placed
    assert {change.action for change in found.values()} == {"load", "move", "keep"}


def test_a_parked_model_comes_back_without_a_load() -> None:
    snapshot = replace(_scattered(), placed=())
    plan = place(snapshot)
    (first, *_) = plan.loads
    (change,) = (change for change in changes(snapshot, plan, parked=[first]) if change.group == first)
    assert change.path == "wake"
    assert change.seconds < 1


def test_promises_at_risk_are_said() -> None:
    devices = node("p", "n", 1, 24, standby_bytes=100 * GIB)
    kept = model("kept", 12, slo=Slo(first_token_s=0.01))
    snapshot = Snapshot(devices, (kept, model("new", 12)), (_on("kept", 0, 14),))
    (change,) = (change for change in changes(snapshot, place(snapshot)) if change.group.model == "new")
    assert change.evicts == ("kept",)
    assert "`kept` may be parked for `new`" in change.risks[0]


def test_why_a_group_is_where_it_is() -> None:
    devices = node("p", "n", 2, 24, type="NVIDIA H200") + node("p", "o", 1, 8, first_rank=2)
    snapshot = Snapshot(devices, (model("m", 9),))
    plan = place(snapshot)
    text = " / ".join(why(replace(snapshot, placed=plan.groups), plan.groups[0]))
    assert "takes " in text
    assert "weights 9.0 GiB" in text
    assert "tensor 1 × pipeline 1 is the smallest that fits" in text
    assert "not rank 2 of pool `p`: 8.0 GiB free" in text
    assert "not rank 1 of pool `p`: fits too" in text
