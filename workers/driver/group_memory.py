"""What a loaded group's memory is, once its ranks have said what they hold."""

from __future__ import annotations

import msgspec

from workers.driver.batching import Batcher
from workers.driver.group import Group
from workers.driver.stream_batcher import StreamBatcher
from workers.memory.blocks import BlockPool
from workers.memory.ledger import Ledger, LedgerFull


def enter_measured(ledger: Ledger, group: Group) -> None:
    """Replace what was planned by what was measured (rule 3); KV is split into floor and what lies above."""
    assert group.sizing is not None
    planned = group.sizing.kv_bytes(group.kv_blocks)
    floor = group.sizing.kv_bytes(group.sizing.floor_blocks)
    for rank, held in group.held.items():
        lines = {kind: size for kind, size in held.bytes.items() if not kind.startswith("kv")}
        kv = sum(size for kind, size in held.bytes.items() if kind.startswith("kv")) or planned[rank]
        lines["kv_floor"] = min(kv, floor[rank])
        lines["kv_used"] = kv - lines["kv_floor"]
        ledger.record(group.id, rank, lines)


def enter_parked(ledger: Ledger, group: Group) -> None:
    """What its ranks measured to be left (rule 3)."""
    for rank, held in group.held.items():
        ledger.record(group.id, rank, {kind: size for kind, size in held.bytes.items() if size})


def reserve_wake(ledger: Ledger, group: Group) -> None:
    """What a wake takes, on all its ranks or on none (rule 3). LedgerFull leaves everything as it was."""
    assert group.sizing is not None
    floor = group.sizing.kv_bytes(group.sizing.floor_blocks)
    wanted = {rank: {**held.wake_bytes, "kv_floor": floor[rank]} for rank, held in group.held.items()}
    for rank, held in group.held.items():
        for kind, size in held.bytes.items():
            if size and not kind.startswith("kv"):  # left behind, or there of a wake that no driver saw end
                wanted[rank][kind] = max(wanted[rank].get(kind, 0), size)
    ledger.release(group.id)
    try:
        ledger.reserve(group.id, wanted)
    except LedgerFull:
        enter_parked(ledger, group)
        raise


def enter_grammar(ledger: Ledger, group: Group, rank: int, size_bytes: int) -> None:
    """What a rank took for schemas of answers, once somebody asked for one."""
    held = group.held.get(rank)
    if held is None or held.bytes.get("grammar", 0) == size_bytes:
        return
    group.held[rank] = msgspec.structs.replace(held, bytes={**held.bytes, "grammar": size_bytes})
    lines = {kind: size for owner, kind, size in ledger.lines(rank) if owner == group.id}
    ledger.record(group.id, rank, {**lines, "grammar": size_bytes})


def open_batcher(group: Group, device: str) -> None:
    """Empty queues over the KV blocks that are mapped now."""
    assert group.sizing is not None
    limits = group.spec.limits
    if group.hosted:
        group.batcher = StreamBatcher(group.kv_blocks, group.sizing.block_tokens, limits.batch_tokens, limits.concurrency)
        return
    stages = group.wanted.placement.pipeline_parallel
    group.batcher = Batcher(
        # What an encoder computes of a text's beginning depends on all of it.
        BlockPool(group.kv_blocks, prefix_cache=group.spec.kv.prefix_cache and not (group.facts and group.facts.shape.encoder)),
        group.sizing.block_tokens,
        limits.batch_tokens,
        limits.concurrency,
        stages,
        # A GPU has its next step ready when one ends. On a CPU the same cores would plan and compute.
        ahead=int(device == "cuda" and stages == 1),
    )
