"""Replicas by load: growth and shrinking by rule, and nothing by a moment."""

from __future__ import annotations

from fleet import SHAPE, model_spec

from gateway.api.config import ScalingSpec
from gateway.api.records import GroupRecord, PoolRecord
from gateway.controller.model_requests import AskedModel
from gateway.controller.scaling import Scaler, as_placed
from placement.types import ModelRequest, PlacedGroup


class Site:
    """One model `m` whose every replica runs 10 sequences at once."""

    def __init__(self, **scaling: object) -> None:
        bounds = {"min_replicas": 1, "max_replicas": 3, "target_load": 0.8, "up_after_s": 5, "down_after_s": 60}
        spec = model_spec(limits={"concurrency": 10}, scaling=ScalingSpec.model_validate(bounds | scaling))
        self.asked = {"m": AskedModel(spec, 1, ModelRequest(name="m", shape=SHAPE))}
        self.scaler = Scaler()
        self.ready = 1
        self.now = 0.0

    def after(self, seconds: float, sequences: int) -> int:
        """Replicas that the model should have when this many sequences have run or waited for so long."""
        for step in (0.0, seconds):
            groups = [GroupRecord("m", 1, number, (number,), 1, 1, "ready") for number in range(self.ready)]
            groups[0] = GroupRecord("m", 1, 0, (0,), 1, 1, "ready", running=min(sequences, 10), waiting=max(sequences - 10, 0))
            pool = PoolRecord("p", "e", "i", "n", 1, "cpu", 1, 1, 0.0, groups=tuple(groups))
            self.now += step
            placed = [PlacedGroup("m", "p", (number,), 1, 1, (1,)) for number in range(self.ready)]
            request = self.scaler.scaled(self.asked, [pool], placed, self.now)["m"].request
            assert request is not None
        return request.replicas


def test_load_above_the_target_for_long_enough_brings_one_more_up_to_the_most() -> None:
    site = Site()
    assert site.after(4.9, 30) == 1
    assert site.after(0.1, 30) == 2
    assert site.after(60, 30) == 2, "one is on its way"
    site.ready = 2
    assert site.after(5, 30) == 3
    site.ready = 3
    assert site.after(1000, 100) == 3


def test_a_moment_of_load_changes_nothing() -> None:
    site = Site()
    for _ in range(10):
        assert site.after(4, 30) == 1
        assert site.after(1, 3) == 1


def test_little_load_for_long_takes_one_away_down_to_the_least() -> None:
    site = Site(min_replicas=1)
    site.ready = 3
    assert site.after(59, 0) == 3
    assert site.after(1, 0) == 2
    site.ready = 2
    assert site.after(60, 0) == 1
    site.ready = 1
    assert site.after(1000, 0) == 1


def test_it_does_not_shrink_to_where_it_would_grow_again() -> None:
    site = Site()
    site.ready = 2
    assert site.after(1000, 7) == 2, "one replica would be at 0.7 of a target of 0.8"
    assert site.after(1000, 6) == 1


def test_a_plan_goes_by_the_replicas_that_are_there() -> None:
    site = Site()
    placed = [PlacedGroup("m", "p", (number,), 1, 1, (1,)) for number in range(2)]
    request = as_placed(site.asked, placed)["m"].request
    assert request is not None
    assert request.replicas == 2


def test_a_model_without_bounds_has_what_it_says() -> None:
    asked = {"m": AskedModel(model_spec(), 1, ModelRequest(name="m", shape=SHAPE, replicas=4))}
    assert Scaler().scaled(asked, [], [], 0.0) == asked
