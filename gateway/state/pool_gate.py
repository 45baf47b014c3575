"""A pool is not made smaller than what its models hold (nothing is lost by a typing error). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.api.config import PoolSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import PoolRecord, RankRecord
from gateway.state.edits import Write, parse_document
from gateway.state.snapshot import Snapshot

# What a group needs to serve at all. KV above its floor is given back on demand, and foreign memory is not the pool's.
_NEEDED = ("weights", "kv_floor", "workspace", "communication", "context")


def guarded(
    edit: Callable[[Snapshot], Sequence[Write]], pools: Mapping[str, PoolRecord]
) -> Callable[[Snapshot], Sequence[Write]]:
    """The same edit, refused with YardError(CONFLICT) when a pool that it shrinks holds more than it would then have."""

    def checked(snapshot: Snapshot) -> Sequence[Write]:
        writes = edit(snapshot)
        problems = [
            problem
            for write in writes
            if write.key.kind == "Pool" and write.action == "changed" and write.document is not None and write.key.name in pools
            for problem in _problems(parse_document(write.document).spec, pools[write.key.name])
        ]
        if problems:
            raise YardError(
                ErrorCode.CONFLICT,
                "\n".join(problems) + "\nmove or delete those models first, or use --force: what does not fit is then unloaded",
                field="spec.memory",
            )
        return writes

    return checked


def _problems(spec: object, record: PoolRecord) -> Iterator[str]:
    assert isinstance(spec, PoolSpec)
    key = f"Pool/{record.pool}"
    lost = sorted({group.model for group in record.groups if any(rank >= spec.devices for rank in group.ranks)})
    if lost:
        yield f"{key}: spec.devices {spec.devices} takes away ranks that {', '.join(lost)} run on (it has {len(record.ranks)})"
    for rank in record.ranks[: spec.devices]:
        needed, models = needs(rank)
        if spec.memory is not None and spec.memory < needed:
            yield (
                f"{key}: spec.memory {spec.memory / 2**30:.2f} GiB is less than the {needed / 2**30:.2f} GiB that "
                f"{', '.join(models)} need on rank {rank.index}"
            )


def needs(rank: RankRecord) -> tuple[int, list[str]]:
    lines = [(model, size) for model, kind, size in rank.ledger if kind in _NEEDED and size]
    return sum(size for _, size in lines), sorted({model for model, _ in lines if model})
