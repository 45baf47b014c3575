"""How busy devices are expected to be, so that hot models are kept apart: memory alone would put them together.

A device is crowded when the mean loads of its models and the largest rise of one of them above its mean exceed what it can
compute: means add up, but peaks of different models seldom meet. A crowded device is avoided, not forbidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from placement.speed import group_speed
from placement.types import Device, ModelRequest, PlacedGroup, Reason


@dataclass(frozen=True)
class Share:
    """Of the time of each of its devices, what one group takes."""

    mean: float = 0.0
    peak: float = 0.0


NOTHING = Share()


def share_of(request: ModelRequest, tensor: int, pipeline: int, kind: str, type_: str) -> Share:
    """One group's part of the model's expected load; nothing when none is given."""
    if request.load is None or not request.replicas:
        return NOTHING
    capacity = group_speed(request, tensor, pipeline, kind, type_).tokens_per_s(request.concurrency) * request.replicas
    return Share(request.load.mean_tokens_per_s / capacity, request.load.peak_tokens_per_s / capacity)


class BusyDevices:
    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], list[Share]] = {}

    def add(self, pool: str, ranks: Iterable[int], share: Share) -> None:
        if share != NOTHING:
            for rank in ranks:
                self._shares.setdefault((pool, rank), []).append(share)

    def crowded_with(self, pool: str, share: Share) -> set[int]:
        """Ranks of the pool that would be crowded with it; empty devices never are."""
        return {rank for (at, rank), shares in self._shares.items() if at == pool and _excess([*shares, share]) > 1.0}

    def of(self, pool: str, rank: int) -> float:
        """What is expected of a device at its worst, as a share of its time."""
        return _excess(self._shares.get((pool, rank), []))


def _excess(shares: list[Share]) -> float:
    return sum(share.mean for share in shares) + max((share.peak - share.mean for share in shares), default=0.0)


def load_notes(
    models: Iterable[ModelRequest], devices: Mapping[tuple[str, int], Device], groups: Iterable[PlacedGroup]
) -> dict[str, tuple[Reason, ...]]:
    """Of the models whose groups together compute less than the peak that is expected of them."""
    asked = {request.name: request for request in models if request.load is not None}
    capacity: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        request = asked.get(group.model)
        device = devices.get((group.pool, group.ranks[0]))
        if request is not None and device is not None:
            speed = group_speed(request, group.tensor_parallel, group.pipeline_parallel, device.kind, device.type)
            capacity[group.model].append(speed.tokens_per_s(request.concurrency))
    notes = {}
    for name in sorted(capacity):
        load, have = asked[name].load, sum(capacity[name])
        if load is not None and load.peak_tokens_per_s > have:
            needed = ceil(load.peak_tokens_per_s / min(capacity[name]))
            text = f"its peak of {load.peak_tokens_per_s:g} tokens/s is above the {have:.0f} that its groups compute"
            notes[name] = (Reason("load", f"{text} by the cost model; ask for replicas: {needed}"),)
    return notes
