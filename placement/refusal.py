"""Why a model has no (further) place: reasons as data, about the model, each pool and each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from placement.free_memory import FreeMemory
from placement.parallelism import degree_problems
from placement.types import Device, ModelRequest, Reason

DEVICES_LISTED = 256  # beyond so many candidate devices the reasons stay per pool

Needs = Mapping[tuple[int, int], tuple[int, ...]]
"""(tensor, pipeline) -> bytes on each rank of every stage."""


def refusal(
    request: ModelRequest, placed: int, devices: Iterable[Device], free: FreeMemory, needs: Mapping[str, Needs]
) -> tuple[Reason, ...]:
    """The first reason is about the model and tells the whole story; then one a pool, then one a device.

    `needs` has the pools that the model may use, each with the degrees that are possible there.
    """
    problems = degree_problems(request)
    if problems:
        return problems
    by_pool: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: (device.pool, device.rank)):
        by_pool.setdefault(device.pool, []).append(device)
    if not by_pool:
        return (Reason("no_device", "the site has no pool with a live device; apply a Pool, or wait for its ranks"),)
    pools = [_pool_reason(request, name, members, free, needs.get(name, {})) for name, members in by_pool.items()]
    listed = [name for name in by_pool if not _outside(request, name, by_pool[name])]
    details: list[Reason] = []
    if sum(len(by_pool[name]) for name in listed) <= DEVICES_LISTED:
        details = [
            reason
            for name in listed
            for device in by_pool[name]
            if (reason := _device_reason(device, free, needs.get(name, {}))) is not None
        ]
    story = "; ".join(reason.message for reason in pools)
    if placed:
        story = f"{placed} of {request.replicas} replicas are placed; for one more: {story}"
    return (Reason(pools[0].code if len(pools) == 1 else "no_fit", story), *pools, *details)


def _outside(request: ModelRequest, pool: str, devices: list[Device]) -> Reason | None:
    if request.pools and pool not in request.pools:
        allowed = ", ".join(f"`{name}`" for name in request.pools)
        return Reason("pool_not_allowed", f"pool `{pool}` is not among its pools ({allowed})", pool)
    if request.device and devices[0].kind != request.device:
        return Reason("device_kind", f"pool `{pool}` is {devices[0].kind}, it asks for {request.device}", pool)
    return None


def _pool_reason(request: ModelRequest, pool: str, devices: list[Device], free: FreeMemory, needs: Needs) -> Reason:
    outside = _outside(request, pool, devices)
    if outside:
        return outside
    open_devices = [(amount, rank) for rank, amount, _ in free.devices(pool)]
    if not open_devices:
        return Reason("no_device", f"none of the {len(devices)} devices of pool `{pool}` is healthy and not cordoned", pool)
    if not needs:
        asked = f"tensor_parallel {request.tensor_parallel or 'auto'} × pipeline_parallel {request.pipeline_parallel or 'auto'}"
        largest = max(len(domain.free) for domain in free.pools[pool])
        message = f"{asked} does not fit pool `{pool}` of {len(open_devices)} devices, at most {largest} of them in one node"
        return Reason("divisibility" if not request.tensor_parallel else "devices", message, pool)
    # The widest split needs the least on each rank: what even that lacks is what is missing.
    (tensor, pipeline), sizes = min(needs.items(), key=lambda item: (max(item[1]), item[0][0] * item[0][1]))
    ranks = tensor * pipeline
    amounts = sorted((amount for amount, _ in open_devices), reverse=True)
    what = _of_largest(ranks, tensor, pipeline, amounts, free, pool)
    return Reason("memory", f"needs {ranks} × {format_bytes(max(sizes))}, {what}", pool)


def _of_largest(ranks: int, tensor: int, pipeline: int, amounts: list[int], free: FreeMemory, pool: str) -> str:
    if ranks == 1:
        return f"largest free device in pool `{pool}` has {format_bytes(amounts[0])}"
    noun = "pair" if ranks == 2 else f"set of {ranks}"
    if pipeline == 1:
        best = max((domain.free[-tensor][0] for domain in free.pools[pool] if len(domain.free) >= tensor), default=0)
        return f"largest free {noun} of one node in pool `{pool}` is {ranks} × {format_bytes(best)}"
    return f"largest free {noun} in pool `{pool}` is {ranks} × {format_bytes(amounts[ranks - 1])}"


def _device_reason(device: Device, free: FreeMemory, needs: Needs) -> Reason | None:
    where = f"rank {device.rank} of pool `{device.pool}` on node {device.node}"
    if not device.healthy:
        return Reason("unhealthy", f"{where} is unhealthy", device.pool, device.rank)
    if device.cordoned:
        return Reason("cordoned", f"{where} is cordoned", device.pool, device.rank)
    amount = free.of(device.pool, device.rank)
    if not needs or amount is None:
        return None
    least = min(min(sizes) for sizes in needs.values())
    if amount >= least:
        return None
    foreign = f", {format_bytes(device.foreign_bytes)} taken by others" if device.foreign_bytes else ""
    message = (
        f"{where} has {format_bytes(amount)} free of {format_bytes(device.capacity_bytes)}{foreign}; {format_bytes(least)} needed"
    )
    return Reason("memory", message, device.pool, device.rank)


def format_bytes(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
