"""Why a worker group is where it is, in sentences: what it takes, why it is split so, and what the other places were. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from placement.footprint import group_footprint
from placement.free_memory import Domain, FreeMemory
from placement.load import share_of
from placement.parallelism import degrees
from placement.refusal import format_bytes
from placement.speed import group_speed, slo_problem
from placement.types import Device, ModelRequest, PlacedGroup, Snapshot

_PLACES = 6  # others that are named


def why(snapshot: Snapshot, group: PlacedGroup) -> tuple[str, ...]:
    """Of a group in `snapshot.placed`, as things are now: its memory counts as free for itself."""
    request = next((model for model in snapshot.models if model.name == group.model), None)
    device = next((each for each in snapshot.devices if (each.pool, each.rank) == (group.pool, group.ranks[0])), None)
    if request is None or device is None:
        return ()
    free = FreeMemory(snapshot.devices)
    for other in snapshot.placed:
        if other != group and not other.standby:
            free.reserve(other.pool, other.ranks, other.bytes_per_rank)
    free.settle()
    return (_takes(request, group, device), *_split(request, group, device, free), *_place(snapshot, request, group, free))


def _takes(request: ModelRequest, group: PlacedGroup, device: Device) -> str:
    stages = group_footprint(request, group.tensor_parallel, group.pipeline_parallel, device.kind, device.type)
    most = max(stages, key=lambda stage: stage.total)
    parts = {
        "weights": most.weights,
        "KV floor": most.kv_floor,
        "workspace": most.workspace,
        "communication": most.communication,
        "graphs": most.graphs,
        "slack": most.slack,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    how = "measured at an earlier load" if most.measured else "estimated until a load has measured it"
    return f"takes {format_bytes(most.total)} on each of its ranks ({listed}; {how})"


def _split(request: ModelRequest, group: PlacedGroup, device: Device, free: FreeMemory) -> Iterator[str]:
    asked = [
        f"{name} {value}"
        for name, value in (("tensor_parallel", request.tensor_parallel), ("pipeline_parallel", request.pipeline_parallel))
        if value
    ]
    here = (group.tensor_parallel, group.pipeline_parallel)
    text = f"tensor {here[0]} × pipeline {here[1]}"
    if len(asked) == 2:
        yield f"{text}, as its spec asks"
        return
    domains = free.pools.get(group.pool, [])
    widest, devices = max((len(domain.free) for domain in domains), default=0), sum(len(domain.free) for domain in domains)
    smaller = []
    for pair in degrees(request, device.kind, widest, devices):
        if pair == here:
            break
        need = max(stage.total for stage in group_footprint(request, *pair, device.kind, device.type))
        slow = slo_problem(request, *pair, device.kind, device.type)
        smaller.append(f"{pair[0]} × {pair[1]} " + (f"is too slow ({slow})" if slow else f"needs {format_bytes(need)} a rank"))
    because = f"; smaller: {'; '.join(smaller)}" if smaller else ""
    yield f"{text} is the smallest that fits{' and meets its slo' if request.slo else ''}{because}"
    speed = group_speed(request, *here, device.kind, device.type)
    yield (
        f"computes about {speed.tokens_per_s(1):.0f} tokens/s for one stream and {speed.tokens_per_s(request.concurrency):.0f} "
        f"for {request.concurrency}, by the cost model"
    )


def _place(snapshot: Snapshot, request: ModelRequest, group: PlacedGroup, free: FreeMemory) -> Iterator[str]:
    if group.standby:
        yield "takes turns with the other models on its ranks: there is no room for all at once"
    need = max(group.bytes_per_rank)
    amounts = [free.of(group.pool, rank) or 0 for rank in group.ranks]
    yield f"rank{'s' if len(amounts) > 1 else ''} {', '.join(map(str, group.ranks))} of pool `{group.pool}` " + (
        f"had {format_bytes(min(amounts))} free for it"
    )
    yield from _exchange(snapshot, group, free)
    others = [device for device in snapshot.devices if device.pool != group.pool or device.rank not in group.ranks]
    for device in others[:_PLACES]:
        yield _other(request, group, device, free.domain(device.pool, device.rank), free, need)
    if len(others) > _PLACES:
        yield f"and {len(others) - _PLACES} devices more"


def _exchange(snapshot: Snapshot, group: PlacedGroup, free: FreeMemory) -> Iterator[str]:
    """What lies between the ranks of its tensor-parallel stages, where that is known."""
    if group.tensor_parallel == 1:
        return
    devices = {device.rank: device for device in snapshot.devices if device.pool == group.pool}
    stages = [group.ranks[at : at + group.tensor_parallel] for at in range(0, len(group.ranks), group.tensor_parallel)]
    if all(devices[rank].nvlink_domain for rank in group.ranks):
        yield "its shards exchange over NVLink"
        return
    for stage in stages:
        nodes = sorted({devices[rank].numa for rank in stage})
        domain = free.domain(group.pool, stage[0])
        if -1 in nodes or domain is None:
            return
        if len(nodes) == 1:
            yield f"rank {', '.join(map(str, stage))} exchange over PCIe inside NUMA node {nodes[0]}"
            continue
        apart = domain.most_free(len(stage), max(group.bytes_per_rank))[1]
        now = (
            f"none has {len(stage)} devices with room" if apart else "one has room by now, and what is placed moves for need only"
        )
        crossed = " and ".join(map(str, nodes))
        yield f"rank {', '.join(map(str, stage))} exchange over PCIe and between NUMA nodes {crossed}: {now}"


def _other(request: ModelRequest, group: PlacedGroup, device: Device, domain: Domain | None, free: FreeMemory, need: int) -> str:
    where = f"not rank {device.rank} of pool `{device.pool}`:"
    amount = free.of(device.pool, device.rank)
    if request.pools and device.pool not in request.pools:
        return f"{where} not among its pools"
    if domain is None or amount is None:
        return f"{where} {'cordoned' if device.cordoned else device.trouble or 'unhealthy'}"
    if amount < need:
        return f"{where} {format_bytes(amount)} free"
    slow = slo_problem(request, group.tensor_parallel, group.pipeline_parallel, device.kind, device.type)
    if slow:
        return f"{where} too slow ({slow})"
    share = share_of(request, group.tensor_parallel, group.pipeline_parallel, device.kind, device.type)
    load = f", which its load would take {share.peak:.0%} of at its peak" if share.peak else ""
    return f"{where} fits too ({format_bytes(amount)} free{load}); what is placed moves for need only"
