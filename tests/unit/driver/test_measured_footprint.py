"""What a load took, reported, kept and used for the next one: the plan never promises what the ledger then refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from pool_world import FACTS, LOAD_MIB, MIB, SHAPE, World, spec, wanted

from gateway.api.config import PoolSpec
from gateway.api.proto.pool_pb2 import Assignment
from gateway.api.records import FootprintRecord, PoolRecord, RankRecord
from gateway.controller.decision import decide
from gateway.controller.footprints import Footprints, remember, with_measured
from gateway.controller.model_requests import AskedModel, model_request
from gateway.controller.pool_digest import deployment_name
from gateway.controller.situation import AppSight, Assign, Decision, Desired, Observed, Placed, PoolSight
from gateway.state.view import PoolEntry
from placement.types import PlacedGroup
from workers.driver.observe import footprint_records, group_records, rank_records
from workers.driver.wire import wanted_of

CAPACITY_MIB = LOAD_MIB + 8
"""Room for one load by its estimate, and for no other beside it."""


class Site:
    """The controller's decision over one pool of one rank, which is a real driver's core."""

    def __init__(self) -> None:
        self.world = World(capacity_mib=CAPACITY_MIB)
        self.known: Footprints = ()
        self.placed: tuple[PlacedGroup, ...] = ()
        self.models: dict[str, AskedModel] = {}
        self.pool = PoolSpec.model_validate({"device": "cpu", "devices": 1, "memory": CAPACITY_MIB * MIB})

    def want(self, *names: str) -> None:
        checkpoint: Any = SimpleNamespace(shape=SHAPE, max_context=256, kv_quantization="")
        for name in names:
            self.models[name] = AskedModel(spec(), 1, model_request(name, spec(), checkpoint), digest=FACTS.digest)

    def record(self) -> PoolRecord:
        state = self.world.core.state
        return PoolRecord(
            "p", "p", "i", "n", 1, "cpu", 0, 0, 0.0,
            ranks=tuple(msgspec.structs.replace(rank, alive=True) for rank in rank_records(state, {})),
            groups=group_records(state, self.world.now, 0.0),
            engine_versions={"torch": "2"},
            footprints=footprint_records(state, {}, {"torch": "2"}),
        )  # fmt: skip

    def controls(self) -> Decision:
        record = self.record()
        self.known = remember(self.known, [record])
        desired = Desired(with_measured(self.models, self.known, [record]), {"p": PoolEntry(self.pool, 1)})
        apps = {"p": AppSight("RUNNING", deployment_name(self.pool))}
        decision = decide(desired, Observed({"p": PoolSight(record)}, apps), Placed(self.placed, fence=1))
        self.placed = decision.groups
        for action in decision.actions:
            if isinstance(action, Assign):
                assignments = map(Assignment.FromString, action.assignments)
                self.world.assign(*(item for each in assignments for item in wanted_of(each)))
        self.world.run()
        self.world.core.state.check()
        return decision


def test_models_fit_by_what_was_measured_and_come_back_after_a_reload() -> None:
    """Rule 3: a reload reserves by the figure that the plan counted, not by the larger estimate."""
    site = Site()
    site.want("a")
    site.controls()
    names = ["a", "b", "c"]
    site.want(*names)  # of one sort with the first, which was measured
    assert not site.controls().unplaced
    assert [site.world.group(name).state for name in names] == ["ready"] * 3
    site.controls()
    site.world.lose_ranks()
    site.world.ranks_up()
    site.world.run()
    assert [site.world.group(name).state for name in names] == ["ready"] * 3, site.world.events[-3:]
    # And under a driver and ranks that know nothing: what was measured is in the store.
    site.world = World(capacity_mib=CAPACITY_MIB)
    assert not site.controls().unplaced
    assert [site.world.group(name).state for name in names] == ["ready"] * 3, site.world.events[-3:]


def test_by_estimates_alone_the_second_model_is_refused_by_the_plan_already() -> None:
    site = Site()
    site.want("a", "b")
    assert set(site.controls().unplaced) == {"b"}


def test_a_load_that_fails_by_the_measured_figure_gets_more() -> None:
    site = Site()
    site.want("a")
    site.controls()
    site.controls()
    measured = sum(site.world.group("a").wanted.measured.weights)  # type: ignore[union-attr]
    site.world.lose_ranks()
    site.world.ranks[0].load_error = "needs more"
    site.world.ranks_up()
    site.world.run()
    first = site.world.group("a")
    assert "needs more" in first.reason
    site.world.ranks[0].load_error = ""
    site.world.later(2.0)
    group = site.world.group("a")
    assert group.state == "ready"
    assert group.sizing is not None
    assert group.sizing.budget[0]["weights"] > measured


def test_a_driver_reports_what_its_groups_hold_by_stage_and_token() -> None:
    world = World(ranks=2, capacity_mib=400).ready(wanted(ranks=(0, 1), stages=2))
    (found,) = footprint_records(world.core.state, {}, {"torch": "2.1"})
    assert (found.digest, found.version, found.tensor_parallel, found.pipeline_parallel) == ("d1", "2.1", 1, 2)
    assert found.weights == (9 * MIB // 2,) * 2
    assert found.workspace == (MIB, MIB)
    assert found.kv_token == (MIB // 2 // 16,) * 2
    world.core.on_set_residency(world.now, 0, "m", "parked")
    world.run()
    assert footprint_records(world.core.state, {}, {"torch": "2.1"}) == ()  # what is parked holds something else


def seen(**changes: object) -> FootprintRecord:
    base = FootprintRecord("d1", "torch", "2", "auto", "cuda", "H200", 1, 1, 32, 4, 256, (100,), (10,), (1,))
    return msgspec.structs.replace(base, **changes)


def pool(*footprints: FootprintRecord, **changes: object) -> PoolRecord:
    record = PoolRecord("p", "p", "i", "n", 1, "cuda", 0, 0, 0.0, engine_versions={"torch": "2"}, footprints=footprints)
    return msgspec.structs.replace(record, **changes)


def test_the_most_of_one_sort_is_kept_a_new_version_begins_anew_and_there_is_a_bound() -> None:
    known = remember((seen(),), [pool(seen(weights=(90,), workspace=(20,)))])
    assert [(each.weights, each.workspace) for each in known] == [((100,), (20,))]
    assert remember(known, [pool(known[0])]) == known
    (newer,) = remember(known, [pool(seen(version="3", weights=(90,)))])
    assert (newer.version, newer.weights) == ("3", (90,))
    many = remember((), [pool(*(seen(digest=f"d{index}") for index in range(1_100)))])
    assert (len(many), many[-1].digest) == (1_000, "d1099")


def test_what_was_measured_counts_for_the_same_checkpoint_limits_version_and_type() -> None:
    site = Site()
    site.want("a")
    for known, counted in (
        (seen(device="cpu", type=""), {""}),
        (seen(), {"H200"}),  # the site has L4s too, which may take something else
        (seen(digest="d2"), set()),
        (seen(version="1"), set()),
        (seen(concurrency=8), set()),
    ):
        ranks = tuple(RankRecord(index, "n", 1, "cuda", 2**30, type=type_) for index, type_ in enumerate(("H200", "L4")))
        request = with_measured(site.models, (known,), [pool(ranks=ranks)])["a"].request
        assert request is not None
        assert {each.type for each in request.measured} == counted
    both = (seen(), seen(type="L4", weights=(80,), workspace=(30,)))
    request = with_measured(site.models, both, [pool(ranks=ranks)])["a"].request
    assert request is not None
    assert {each.type: (each.weights, each.workspace) for each in request.measured} == {
        "H200": ((100,), (10,)),
        "L4": ((80,), (30,)),
        "": ((100,), (30,)),
    }
