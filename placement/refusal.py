"""Why a model has no (further) place: reasons as data, about the model, each pool and each device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from placement.free_memory import Domain, FreeMemory
from placement.parallelism import degree_problems
from placement.replicas import Replicas
from placement.types import Device, ModelRequest, Reason

DEVICES_LISTED = 256  # beyond so many candidate devices the reasons stay per pool
_RANKS_LISTED = 8

Needs = Mapping[tuple[int, int], tuple[int, ...]]
"""(tensor, pipeline) -> bytes on each rank of every stage."""


def refusal(
    request: ModelRequest,
    placed: int,
    devices: Iterable[Device],
    free: FreeMemory,
    needs: Mapping[str, Needs],
    replicas: Replicas,
    blocked: Collection[str],
    slow: Mapping[str, Collection[str]],
) -> tuple[Reason, ...]:
    """The first reason is about the model and tells the whole story; then one a pool, then one a device.

    `needs` has the pools that the model may use, each with the degrees that are possible there; `replicas` its groups that
    are placed, `blocked` the pools where one more would fit if it could share devices with these, and `slow` by pool how each
    of the degrees would miss its SLO there (empty where it would not).
    """
    problems = degree_problems(request)
    if problems:
        return problems
    by_pool: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: (device.pool, device.rank)):
        by_pool.setdefault(device.pool, []).append(device)
    if not by_pool:
        return (Reason("no_device", "no pool of the site has told of a device yet; apply a Pool, or wait for its ranks"),)
    pools = [
        _outside(request, name, members)
        or _slow(name, slow.get(name, ()))
        or _pool_reason(request, name, len(members), free, needs.get(name, {}), replicas, name in blocked)
        for name, members in by_pool.items()
    ]
    listed = [name for name in by_pool if not _outside(request, name, by_pool[name])]
    details: list[Reason] = []
    if sum(len(by_pool[name]) for name in listed) <= DEVICES_LISTED:
        details = [
            reason
            for name in listed
            for device in by_pool[name]
            if (reason := _device_reason(device, free, needs.get(name, {}), replicas)) is not None
        ]
    story = "; ".join(reason.message for reason in pools)
    if placed:
        story = f"{placed} of {request.replicas} replicas are placed; for one more: {story}"
    return (Reason(pools[0].code if len(pools) == 1 else "no_fit", story), *pools, *details)


def _outside(request: ModelRequest, pool: str, devices: list[Device]) -> Reason | None:
    if request.pools and pool not in request.pools:
        allowed = ", ".join(f"`{name}`" for name in request.pools)
        return Reason("pool_not_allowed", f"pool `{pool}` is not among its pools ({allowed})", pool)
    engines = devices[0].engines
    if engines and request.engine not in engines:
        return Reason("engine", f"pool `{pool}` computes with {', '.join(engines)}, it asks for {request.engine}", pool)
    if request.device and devices[0].kind != request.device:
        return Reason("device_kind", f"pool `{pool}` is {devices[0].kind}, it asks for {request.device}", pool)
    return None


def _slow(pool: str, problems: Collection[str]) -> Reason | None:
    """Only where nothing that is possible there would be fast enough; the widest split is the fastest."""
    if not problems or not all(problems):
        return None
    return Reason("slo", f"pool `{pool}` is too slow for it ({list(problems)[-1]})", pool)


def _pool_reason(
    request: ModelRequest, pool: str, devices: int, free: FreeMemory, needs: Needs, replicas: Replicas, blocked: bool
) -> Reason:
    alive = sum(len(domain.free) for domain in free.pools.get(pool, ()))
    if not alive:
        return Reason("no_device", f"none of the {devices} devices of pool `{pool}` is healthy and not cordoned", pool)
    if not needs:
        asked = f"tensor_parallel {request.tensor_parallel or 'auto'} × pipeline_parallel {request.pipeline_parallel or 'auto'}"
        largest = max(len(domain.free) for domain in free.pools[pool])
        message = f"{asked} does not fit pool `{pool}` of {alive} devices, at most {largest} of them in one node"
        return Reason("divisibility" if not request.tensor_parallel else "devices", message, pool)
    free.settle()
    rest = [domain for domain in map(replicas.rest, free.pools[pool]) if domain.free]
    holders = replicas.ranks.get(pool)
    left = sum(len(domain.free) for domain in rest)
    possible = {pair: sizes for pair, sizes in needs.items() if pair[0] * pair[1] <= left} or needs
    # The widest split needs the least on each rank: what even that lacks is what is missing.
    (tensor, pipeline), sizes = min(possible.items(), key=lambda item: (max(item[1]), item[0][0] * item[0][1]))
    lack = f"needs {tensor * pipeline} × {format_bytes(max(sizes))}, {_largest(tensor, pipeline, rest, pool)}" if rest else ""
    if not holders:
        return Reason("memory", lack, pool)
    held = f"{_ranks(holders)} of pool `{pool}` {'hold' if len(holders) > 1 else 'holds'} a replica of it already"
    if not blocked and rest:
        return Reason("memory", f"{lack} beside those of its replicas ({held})", pool)
    others = f" (the others: {lack})" if rest else ""
    fix = "a second one on the same device adds neither throughput nor safety: add a device, or ask for fewer replicas"
    return Reason("replica_here", f"{held}{others}; {fix}", pool)


def _largest(tensor: int, pipeline: int, domains: list[Domain], pool: str) -> str:
    ranks = tensor * pipeline
    amounts = sorted((amount for domain in domains for amount, _ in domain.free), reverse=True)
    if ranks == 1:
        return f"largest free device in pool `{pool}` has {format_bytes(amounts[0])}"
    if len(amounts) < ranks:
        return f"pool `{pool}` has {len(amounts)} free device{'s' if len(amounts) > 1 else ''}"
    noun = "pair" if ranks == 2 else f"set of {ranks}"
    if pipeline == 1:
        best = max((domain.free[-tensor][0] for domain in domains if len(domain.free) >= tensor), default=0)
        return f"largest free {noun} of one node in pool `{pool}` is {ranks} × {format_bytes(best)}"
    return f"largest free {noun} in pool `{pool}` is {ranks} × {format_bytes(amounts[ranks - 1])}"


def _ranks(ranks: Collection[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)[:_RANKS_LISTED]))
    more = f" and {len(ranks) - _RANKS_LISTED} more" if len(ranks) > _RANKS_LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _device_reason(device: Device, free: FreeMemory, needs: Needs, replicas: Replicas) -> Reason | None:
    where = f"rank {device.rank} of pool `{device.pool}` on node {device.node}"
    if not device.healthy:
        why = f": {device.trouble}" if device.trouble else ""
        return Reason("unhealthy", f"{where} is unhealthy{why}", device.pool, device.rank)
    if device.cordoned:
        return Reason("cordoned", f"{where} is cordoned", device.pool, device.rank)
    if device.rank in replicas.ranks.get(device.pool, ()):
        return Reason("replica_here", f"{where} holds a replica of it already", device.pool, device.rank)
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
