"""What a driver tells the site about itself: its state as records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import cast

from gateway.api.records import FootprintRecord, GroupRecord, ModelState, ModelTotals, RankRecord, SwitchRecord
from placement.footprint import common_type
from workers.driver.estimates import coming_in_s
from workers.driver.group import Group
from workers.driver.pool_state import PoolState
from workers.driver.residency import STANDING_BY
from workers.messages import DeviceLoad, HeldShard, Welcome

_UNKNOWN = DeviceLoad(-1.0, 0, 0)


def rank_records(
    state: PoolState,
    welcomes: Mapping[int, Welcome],
    device_loads: Mapping[int, DeviceLoad] | None = None,
    seen: Mapping[int, Welcome] | None = None,
) -> tuple[RankRecord, ...]:
    """`seen`: what ranks that are away said of themselves last; their devices stay what they are."""
    records = []
    for rank, capacity in enumerate(state.capacities):
        load = (device_loads or {}).get(rank, _UNKNOWN)
        welcome = welcomes.get(rank) or (seen or {}).get(rank)
        lines: Counter[tuple[str, str]] = Counter()
        for owner, kind, size in state.ledger.lines(rank):
            group = state.groups.get(owner) if isinstance(owner, int) else None
            if size:
                lines[group.model if group else str(owner), kind] += size
        records.append(
            RankRecord(
                index=rank,
                node=welcome.node if welcome else "",
                pid=welcomes[rank].pid if rank in welcomes else 0,
                device=state.device,
                capacity_bytes=capacity,
                ledger=tuple((model, kind, size) for (model, kind), size in sorted(lines.items())),
                alive=state.ranks_up and rank in welcomes,
                unaccounted_bytes=state.unaccounted_bytes(rank),
                utilization=round(load.utilization, 3),
                used_bytes=load.used_bytes,
                total_bytes=load.total_bytes,
                link_bytes_per_s=load.link_bytes_per_s,
                type=welcome.facts.type if welcome else "",
                nvlink_domain=welcome.facts.nvlink_domain if welcome else "",
                numa=welcome.facts.numa if welcome else -1,
                trouble=welcome.facts.trouble if welcome else "",
            )
        )
    return tuple(records)


def group_records(state: PoolState, now: float, unix_offset: float) -> tuple[GroupRecord, ...]:
    """`unix_offset`: what to add to the driver's clock to get Unix time."""
    return tuple(_group_record(state, now, group, unix_offset) for _, group in sorted(state.groups.items()))


def footprint_records(state: PoolState, welcomes: dict[int, Welcome], versions: Mapping[str, str]) -> tuple[FootprintRecord, ...]:
    """Of the groups that serve from memory; `versions` by engine. What is kept of a group that was parked and woken is alike."""
    groups = (group for _, group in sorted(state.groups.items()))
    return tuple(
        _footprint(group, state.device, welcomes, versions[group.spec.engine])
        for group in groups
        if group.state == "ready" and group.op is None and len(group.held) == len(group.ranks) and group.spec.engine in versions
    )


def _footprint(group: Group, device: str, welcomes: dict[int, Welcome], version: str) -> FootprintRecord:
    placement, spec = group.wanted.placement, group.spec
    tensor, stages = placement.tensor_parallel, range(placement.pipeline_parallel)
    shards = [[group.held[rank] for rank in group.ranks[stage * tensor : (stage + 1) * tensor]] for stage in stages]
    first = shards[0][0]
    tokens = max(first.kv_blocks * first.kv_block_tokens, 1)

    def most(size_of: Callable[[HeldShard], int]) -> tuple[int, ...]:
        return tuple(max(map(size_of, stage)) for stage in shards)

    return FootprintRecord(
        digest=first.digest,
        engine=spec.engine,
        version=version,
        precision=spec.precision,
        device=device,
        type=common_type(welcomes[rank].facts.type if rank in welcomes else "" for rank in group.ranks),
        tensor_parallel=tensor,
        pipeline_parallel=placement.pipeline_parallel,
        batch_tokens=spec.limits.batch_tokens,
        concurrency=spec.limits.concurrency,
        context=first.context,
        weights=most(lambda held: held.bytes.get("weights", 0)),
        workspace=most(lambda held: sum(size for kind, size in held.bytes.items() if not kind.startswith(("weights", "kv")))),
        kv_token=most(lambda held: sum(size for kind, size in held.bytes.items() if kind.startswith("kv")) // tokens),
    )


def switch_records(state: PoolState) -> tuple[SwitchRecord, ...]:
    return tuple(
        SwitchRecord(
            path,
            switches.count,
            switches.seconds[-1],
            median(switches.seconds),
            max(switches.seconds),
            total_s=switches.buckets.total_s,
            bytes=switches.bytes,
            link_share=round(switches.link_share, 4),
            buckets=tuple(switches.buckets.counts),
        )
        for path, switches in sorted(state.switches.items())
    )


def model_totals(state: PoolState) -> tuple[ModelTotals, ...]:
    return tuple(
        ModelTotals(model, totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens, totals.failed)
        for model, totals in sorted(state.totals.items())
    )


def loads(state: PoolState) -> tuple[tuple[str, int, int, int], ...]:
    """(model, outstanding tokens, running, waiting) of every model with a ready group."""
    sums: dict[str, list[int]] = {}
    for group in state.groups.values():
        if group.state == "ready":
            load = sums.setdefault(group.model, [0, 0, 0])
            load[0] += group.outstanding_tokens
            load[1] += group.running
            load[2] += group.waiting
    return tuple((model, *load) for model, load in sorted(sums.items()))  # type: ignore[misc]


def _group_record(state: PoolState, now: float, group: Group, unix_offset: float) -> GroupRecord:
    held = next(iter(group.held.values()), None)
    placement = group.wanted.placement
    stands_by = group.state in STANDING_BY
    mapped, used, holes = _kv_use(group)
    coming_s = coming_in_s(state, now, group)
    shown = "parked" if stands_by else "draining" if state.closing and group.state == "ready" else group.state
    return GroupRecord(
        model=group.model,
        generation=group.wanted.generation,
        group=group.id,
        ranks=placement.ranks,
        tensor_parallel=placement.tensor_parallel,
        pipeline_parallel=placement.pipeline_parallel,
        state=cast("ModelState", shown),
        reason=group.reason,
        progress=round(group.progress, 3),
        engine=group.spec.engine,
        precision=held.precision if held else "",
        digest=held.digest if held else (group.facts.digest if group.facts else ""),
        context=group.sizing.context if group.sizing else 0,
        running=group.running,
        waiting=group.waiting,
        outstanding_tokens=group.outstanding_tokens,
        ready_since_unix=group.ready_since + unix_offset if group.ready_since else 0.0,
        ready_in_s=-1.0 if coming_s is None else round(coming_s, 1),
        residency=group.state if stands_by else "",
        standby_bytes=sum(held.standby_bytes for held in group.held.values()),
        kv_bytes=mapped,
        kv_used_bytes=used,
        kv_hole_bytes=holes,
    )


def _kv_use(group: Group) -> tuple[int, int, int]:
    """Bytes over all ranks: mapped, held by sequences, and not held though they lie below the highest block that is."""
    if group.batcher is None or group.sizing is None:
        return 0, 0, 0
    blocks, size = group.batcher.blocks, sum(group.sizing.block_bytes.values())
    return group.kv_blocks * size, blocks.used * size, (blocks.highest_used() + 1 - blocks.used) * size
