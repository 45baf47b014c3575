"""How many replicas a model has by its load, between the bounds of its specification. Pure but for what it remembers: since when.

    load = sequences that run or wait in pools, over what all ready replicas can run at once (limits.concurrency each)

1. Above `target_load` for `up_after_s`: one more, and again after as long.
2. So low for `down_after_s` that one less would be well below the target: one less.
3. Nothing changes while a replica is on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.api.config import ScalingSpec
from gateway.api.records import GroupRecord, PoolRecord
from gateway.controller.model_requests import AskedModel
from placement.types import PlacedGroup

HYSTERESIS = 0.25
"""A model does not shrink to where it would be so near its target that it grows again."""


@dataclass(frozen=True)
class _Since:
    """When the load was first seen where it calls for a change."""

    replicas: int
    high: float | None = None
    low: float | None = None


class Scaler:
    """Remembers how many replicas each scaled model has now, and since when that is too few or too many."""

    def __init__(self) -> None:
        self._models: dict[str, _Since] = {}

    def scaled(
        self, asked: Mapping[str, AskedModel], pools: Iterable[PoolRecord], placed: Iterable[PlacedGroup], now: float
    ) -> dict[str, AskedModel]:
        """The same models, with as many replicas as they should have now."""
        groups: dict[str, list[GroupRecord]] = {}
        for pool in pools:
            for group in pool.groups:
                groups.setdefault(group.model, []).append(group)
        present = Counter(group.model for group in placed)
        self._models = {name: known for name, known in self._models.items() if name in asked}
        return {name: self._one(name, model, groups.get(name, []), present[name], now) for name, model in asked.items()}

    def _one(self, name: str, model: AskedModel, groups: list[GroupRecord], present: int, now: float) -> AskedModel:
        scaling = model.spec.scaling
        if scaling is None or not model.spec.replicas:
            self._models.pop(name, None)
            return model
        known = self._models.get(name) or _Since(present or model.spec.replicas)
        known = replace(known, replicas=min(max(known.replicas, scaling.min_replicas), scaling.max_replicas))
        ready = sum(group.state == "ready" for group in groups)
        if ready >= known.replicas:
            busy = sum(group.running + group.waiting for group in groups) / model.spec.limits.concurrency
            known = _next(known, scaling, busy, now)
        else:
            known = replace(known, high=None, low=None)
        self._models[name] = known
        return with_replicas(model, known.replicas)


def with_replicas(model: AskedModel, replicas: int) -> AskedModel:
    request = model.request and replace(model.request, replicas=replicas)
    return replace(model, request=request)


def as_placed(asked: Mapping[str, AskedModel], placed: Iterable[PlacedGroup]) -> dict[str, AskedModel]:
    """Scaled models with the replicas that they have: what a plan without a load goes by."""
    return Scaler().scaled(asked, (), placed, 0.0)


def _next(known: _Since, scaling: ScalingSpec, busy: float, now: float) -> _Since:
    """`busy` in replicas' worth of sequences."""
    if busy > scaling.target_load * known.replicas and known.replicas < scaling.max_replicas:
        since = now if known.high is None else known.high
        grow = now - since >= scaling.up_after_s
        return _Since(known.replicas + 1) if grow else _Since(known.replicas, high=since)
    fewer = known.replicas - 1
    if fewer >= scaling.min_replicas and busy <= scaling.target_load * fewer * (1 - HYSTERESIS):
        since = now if known.low is None else known.low
        shrink = now - since >= scaling.down_after_s
        return _Since(fewer) if shrink else _Since(known.replicas, low=since)
    return _Since(known.replicas)
