"""What a plan would do to a site, group by group: how, how long, how many bytes, and whose promises it puts at risk. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from placement.transfer import Path, transfer_s
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot

Action = Literal["load", "move", "unload", "keep"]


@dataclass(frozen=True)
class Change:
    """One group. `path`, `bytes` and `seconds` are of its way in; a moved group serves where it was until then."""

    action: Action
    group: PlacedGroup
    before: PlacedGroup | None = None  # of a move
    path: Path | None = None
    bytes: int = 0
    seconds: float = 0.0
    evicts: tuple[str, ...] = ()  # models that leave memory when it is asked for: it takes turns with them
    risks: tuple[str, ...] = ()  # sentences, each about a model with an SLO


def changes(snapshot: Snapshot, plan: Plan, parked: Collection[PlacedGroup] = ()) -> tuple[Change, ...]:
    """`parked` names groups whose weights stand by where they are: they come back without a load."""
    kinds = {(device.pool, device.rank): device for device in snapshot.devices}
    requests = {request.name: request for request in snapshot.models}
    on_rank: dict[tuple[str, int], list[PlacedGroup]] = defaultdict(list)
    for group in plan.groups:
        for rank in group.ranks:
            on_rank[group.pool, rank].append(group)
    leaving: dict[str, list[PlacedGroup]] = defaultdict(list)
    for group in plan.unloads:
        leaving[group.model].append(group)
    found = []
    for group in plan.groups:
        if group not in plan.loads:
            found.append(Change("keep", group))
            continue
        before = leaving[group.model].pop(0) if leaving[group.model] else None
        path: Path = "wake" if group in parked else "load"
        device = kinds[group.pool, group.ranks[0]]
        seconds = transfer_s(group.bytes_per_rank, device.kind, path)
        neighbours = {other.model: other for rank in group.ranks for other in on_rank[group.pool, rank] if other != group}
        evicts = tuple(sorted(name for name, other in neighbours.items() if group.standby and _may_leave(requests, name, other)))
        risks = _risks(group, requests, neighbours.values(), evicts, device, seconds)
        found.append(
            Change("move" if before else "load", group, before, path, sum(group.bytes_per_rank), seconds, evicts, tuple(risks))
        )
    rest = Counter(group for groups in leaving.values() for group in groups)
    found += [Change("unload", group, risks=tuple(_fewer(group, requests, plan))) for group in rest.elements()]
    return tuple(sorted(found, key=lambda change: (change.group.model, change.group.pool, change.group.ranks)))


def _may_leave(requests: Mapping[str, ModelRequest], name: str, group: PlacedGroup) -> bool:
    return name in requests and not requests[name].pinned and not group.standby


def _risks(
    group: PlacedGroup,
    requests: Mapping[str, ModelRequest],
    neighbours: Iterable[PlacedGroup],
    evicts: Collection[str],
    device: Device,
    seconds: float,
) -> Iterable[str]:
    own = requests[group.model].slo
    if own is not None and group.standby:
        wake_s = transfer_s(group.bytes_per_rank, device.kind, "wake")
        if own.first_token_s is None or wake_s > own.first_token_s:
            yield f"`{group.model}` takes turns: after a pause its first token waits {wake_s:.2f} s for the wake"
    for other in neighbours:
        request = requests.get(other.model)
        if request is None or request.slo is None:
            continue
        if other.model in evicts:
            wake_s = transfer_s(other.bytes_per_rank, device.kind, "wake")
            yield f"`{other.model}` may be parked for `{group.model}`; its next first token then waits {wake_s:.2f} s"
        elif other.model != group.model:
            yield f"`{other.model}` shares {_ranks(other, group)} with `{group.model}`, whose load takes {seconds:.0f} s"


def _fewer(group: PlacedGroup, requests: Mapping[str, ModelRequest], plan: Plan) -> Iterable[str]:
    request = requests.get(group.model)
    if request is not None and request.slo is not None and request.replicas:
        left = sum(other.model == group.model for other in plan.groups)
        yield f"`{group.model}` is left with {left} of {request.replicas} replicas"


def _ranks(one: PlacedGroup, other: PlacedGroup) -> str:
    common = sorted(set(one.ranks) & set(other.ranks))
    return f"rank{'s' if len(common) > 1 else ''} {', '.join(map(str, common))}"
