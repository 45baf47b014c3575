"""What a driver tells the site about itself: its state as records."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import cast

from gateway.api.records import GroupRecord, ModelState, RankRecord, SwitchRecord
from workers.driver.group import Group
from workers.driver.pool_state import PoolState
from workers.driver.residency import STANDING_BY
from workers.messages import Welcome


def rank_records(state: PoolState, welcomes: dict[int, Welcome]) -> tuple[RankRecord, ...]:
    records = []
    for rank, capacity in enumerate(state.capacities):
        welcome = welcomes.get(rank)
        lines: Counter[tuple[str, str]] = Counter()
        for owner, kind, size in state.ledger.lines(rank):
            group = state.groups.get(owner) if isinstance(owner, int) else None
            if size:
                lines[group.model if group else str(owner), kind] += size
        records.append(
            RankRecord(
                index=rank,
                node=welcome.node if welcome else "",
                pid=welcome.pid if welcome else 0,
                device=state.device,
                capacity_bytes=capacity,
                ledger=tuple((model, kind, size) for (model, kind), size in sorted(lines.items())),
                alive=state.ranks_up and welcome is not None,
                unaccounted_bytes=state.unaccounted_bytes(rank),
            )
        )
    return tuple(records)


def group_records(state: PoolState, unix_offset: float) -> tuple[GroupRecord, ...]:
    """`unix_offset`: what to add to the driver's clock to get Unix time."""
    return tuple(_group_record(group, unix_offset, closing=state.closing) for _, group in sorted(state.groups.items()))


def switch_records(state: PoolState) -> tuple[SwitchRecord, ...]:
    return tuple(
        SwitchRecord(path, switches.count, switches.seconds[-1], median(switches.seconds), max(switches.seconds))
        for path, switches in sorted(state.switches.items())
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


def _group_record(group: Group, unix_offset: float, *, closing: bool) -> GroupRecord:
    held = next(iter(group.held.values()), None)
    placement = group.wanted.placement
    stands_by = group.state in STANDING_BY
    state = "parked" if stands_by else "draining" if closing and group.state == "ready" else group.state
    return GroupRecord(
        model=group.model,
        generation=group.wanted.generation,
        group=group.id,
        ranks=placement.ranks,
        tensor_parallel=placement.tensor_parallel,
        pipeline_parallel=placement.pipeline_parallel,
        state=cast("ModelState", state),
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
        residency=group.state if stands_by else "",
        standby_bytes=sum(held.standby_bytes for held in group.held.values()),
    )
