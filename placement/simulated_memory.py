"""Who is in device memory in a simulation: parks and wakes, decided as pool drivers do (`parking`), timed by the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from placement.parking import TURN_S, Resident, Wanting, make_room
from placement.simulated_group import SimulatedGroup
from placement.transfer import transfer_s
from placement.types import Device, ModelRequest, PlacedGroup

At = Callable[[float, SimulatedGroup | None], None]
_PARK_SHARE = 0.1  # a park with a host copy is an unmap: 8 ms where the wake takes 245 (results/pool-nvidia-h200-*.json)


@dataclass
class _Held:
    """Bytes of one group by device, and what its switches take."""

    bytes: dict[int, int]
    wake_s: float
    pinned: bool
    priority: int
    keep_warm_s: float
    kv_token_bytes: float


class SimulatedMemory:
    def __init__(self, devices: Sequence[Device], at: At) -> None:
        self._free = [device.capacity_bytes - device.foreign_bytes for device in devices]
        self._at = at
        self._held: dict[int, _Held] = {}
        self._turn_at = -1.0
        self.resident = [0] * len(devices)
        self.switches = 0

    def enter(
        self, group: SimulatedGroup, placed: PlacedGroup, request: ModelRequest, device: Device, kv_token_bytes: float
    ) -> None:
        """At the beginning: groups that take turns stand by."""
        sizes = dict(zip(group.places, placed.bytes_per_rank, strict=True))
        wake_s = transfer_s(placed.bytes_per_rank, device.kind, "wake")
        self._held[group.index] = _Held(sizes, wake_s, request.pinned, request.priority, request.keep_warm_s, kv_token_bytes)
        if placed.standby:
            group.state = "parked"
        else:
            self._take(group)

    def bring(self, group: SimulatedGroup, others: Iterable[SimulatedGroup], asked_s: float, now: float) -> None:
        """Wake a parked group, or begin to make room for it."""
        held = self._held[group.index]
        missing = {place: size - self._free[place] for place, size in held.bytes.items()}
        others = list(others)
        for other in others:
            if other.state == "parking":
                for place, size in self._held[other.index].bytes.items():
                    if place in missing:
                        missing[place] -= size
        short = any(size > self._free[place] for place, size in held.bytes.items())
        if not short:
            self._take(group)
            group.state = "waking"
            self._at(now + held.wake_s, group)
            return
        chosen = make_room(self._residents(others, now), Wanting(held.priority, True, now - asked_s), missing)
        if chosen is None:
            if self._turn_at <= now:  # look again when busy ones have to take turns, and then now and again
                self._turn_at = max(asked_s + TURN_S, now + TURN_S / 4)
                self._at(self._turn_at, None)
            return
        by_index = {other.index: other for other in others}
        for index in chosen:
            by_index[index].state = "parking"
            if not by_index[index].inside:
                self.park(by_index[index], now)

    def park(self, group: SimulatedGroup, now: float) -> None:
        """One that is quiet."""
        self._at(now + self._held[group.index].wake_s * _PARK_SHARE, group)

    def done(self, group: SimulatedGroup, now: float) -> None:
        if group.state == "waking":
            group.state = "ready"
            group.used_s = group.ready_s = now
            self.switches += 1
        elif group.state == "parking":
            group.state = "parked"
            for place, size in self._held[group.index].bytes.items():
                self._free[place] += size
                self.resident[place] -= size

    def kv_bytes(self, groups: Iterable[SimulatedGroup]) -> int:
        return int(sum(group.kv_tokens * self._held[group.index].kv_token_bytes for group in groups))

    def _take(self, group: SimulatedGroup) -> None:
        for place, size in self._held[group.index].bytes.items():
            self._free[place] -= size
            self.resident[place] += size

    def _residents(self, others: Iterable[SimulatedGroup], now: float) -> Iterator[Resident]:
        for other in others:
            held = self._held[other.index]
            if other.state == "ready" and not held.pinned:
                idle_s, ready_s = now - other.used_s, now - other.ready_s
                quiet = not other.inside
                yield Resident(other.index, held.bytes, quiet, idle_s, ready_s, held.priority, held.keep_warm_s, held.wake_s)
