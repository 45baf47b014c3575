"""Whether given groups fit on so many devices, and on which: sets of devices are tried, the largest ones first.

Closing devices one after the other ends where wide groups would have to change places as one. Starting anew on a smaller set
does not: its devices are chosen by domain, so that wide groups find whole ones, and are filled one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from placement.filling import Steps, fill
from placement.types import Device, PlacedGroup, Snapshot

_SETS = 96
_SET_STEPS = (40_000, 400_000)  # of `filling`, for one set: first some for each, then, of what is left, more


def on_fewer(snapshot: Snapshot, groups: tuple[PlacedGroup, ...], count: int, steps: Steps) -> tuple[PlacedGroup, ...] | None:
    """The groups on at most `count` devices; None where no such set was found. Pipelines are not moved: with one it is None."""
    if any(group.pipeline_parallel > 1 for group in groups):
        return None
    kind_of = {(device.pool, device.rank): device.kind for device in snapshot.devices}
    kinds = {group.model: kind_of[group.pool, group.ranks[0]] for group in groups}
    models = {request.name: request for request in snapshot.models}
    total = sum(sum(group.bytes_per_rank) for group in groups)
    widest = max((group.tensor_parallel for group in groups), default=1)
    for most in _SET_STEPS:
        for chosen in islice(_sets(snapshot.devices, count, total, widest), _SETS):
            share = Steps(min(steps.left, most))
            before = share.left
            found = fill(chosen, models, kinds, groups, share)
            if found is not None:
                return found
            if not steps.take(before - share.left):
                return None
    return None


@dataclass(frozen=True)
class _Domain:
    """Devices of one pool, node and NVLink domain, the largest first."""

    devices: tuple[Device, ...]
    sort: tuple  # domains of one sort are alike

    def bytes(self, count: int) -> int:
        return sum(map(_usable, self.devices[:count]))


def _sets(devices: tuple[Device, ...], count: int, total_bytes: int, widest: int) -> Iterator[tuple[Device, ...]]:
    """Sets of `count` devices that could hold so many bytes, descending by their bytes; of alike domains the first ones have
    the most devices in it, and one domain has as many as the widest group has ranks.

    Of one domain always the largest devices are in a set: smaller ones could hold nothing that these cannot. Best first:
    from one set to the next a device of one domain is exchanged for one of another.
    """
    domains = _domains(devices)
    first = _most_bytes(domains, count)
    if sum(first) < count:
        return
    queue = [(-_bytes(domains, first), first)]
    seen = {first}
    while queue:
        negative, counts = heappop(queue)
        if -negative < total_bytes:
            return
        if max(counts) >= widest:
            yield tuple(device for domain, taken in zip(domains, counts, strict=True) for device in domain.devices[:taken])
        for other in _neighbours(domains, counts):
            if other not in seen:
                seen.add(other)
                heappush(queue, (-_bytes(domains, other), other))


def _domains(devices: tuple[Device, ...]) -> list[_Domain]:
    by_key: dict[tuple[str, str, str], list[Device]] = {}
    for device in devices:
        if device.healthy and not device.cordoned:
            by_key.setdefault((device.pool, device.node, device.nvlink_domain), []).append(device)
    domains = []
    for key in sorted(by_key):
        members = tuple(sorted(by_key[key], key=lambda device: (-_usable(device), device.rank)))
        domains.append(_Domain(members, (key[0], *map(_usable, members))))
    return sorted(domains, key=lambda domain: domain.sort)


def _most_bytes(domains: list[_Domain], count: int) -> tuple[int, ...]:
    sizes = sorted(
        ((-_usable(device), at) for at, domain in enumerate(domains) for device in domain.devices), key=lambda entry: entry
    )
    counts = [0] * len(domains)
    for _, at in sizes[:count]:
        counts[at] += 1
    return tuple(counts)


def _neighbours(domains: list[_Domain], counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at, taken in enumerate(counts):
        if not taken:
            continue
        for other, domain in enumerate(domains):
            if other == at or counts[other] == len(domain.devices):
                continue
            changed = list(counts)
            changed[at] -= 1
            changed[other] += 1
            if all(
                changed[left] >= changed[left + 1]
                for left in range(len(domains) - 1)
                if domains[left].sort == domains[left + 1].sort
            ):
                yield tuple(changed)


def _bytes(domains: list[_Domain], counts: tuple[int, ...]) -> int:
    return sum(domain.bytes(taken) for domain, taken in zip(domains, counts, strict=True))


def _usable(device: Device) -> int:
    return device.capacity_bytes - device.foreign_bytes
