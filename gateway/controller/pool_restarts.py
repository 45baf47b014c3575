"""The pools that a change starts anew: all their models leave and come back. What of it `plan` and `apply` say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import ValidationError

from gateway.api.config import Manifest, PoolSpec
from gateway.api.records import PoolRecord, RankRecord
from gateway.controller.pool_digest import AT_NEXT_START, changed_fields, restart_fields
from gateway.controller.situation import DRAIN_S


def pool_spec(document: dict | None) -> PoolSpec | None:
    """None when there is none, or this version cannot read it."""
    try:
        spec = Manifest.model_validate(document).spec if document else None
    except ValidationError:
        return None
    return spec if isinstance(spec, PoolSpec) else None


def restart_reason(pool: str, before: PoolSpec, after: PoolSpec) -> str:
    """Why the pool starts anew; empty when it does not."""
    fields = [f"spec.{name}" for name in restart_fields(before, after)]
    return f"pool `{pool}` restarts, because {' and '.join(fields)} change{'s' if len(fields) == 1 else ''}" if fields else ""


def notes(before: PoolSpec, after: PoolSpec, record: PoolRecord) -> list[str]:
    """What a change of a running pool means beyond the change itself."""
    if reason := restart_reason(record.pool, before, after):
        models = sorted({group.model for group in record.groups})
        what = f"all its models ({', '.join(models)}) are unloaded and loaded again" if models else "it holds no model"
        return [f"{reason}: requests in flight have {DRAIN_S:.0f} s to finish, then {what}"]
    later = [f"spec.{name}" for name in changed_fields(before, after) if name in AT_NEXT_START]
    if later:
        return [f"{' and '.join(later)} restarts nothing; it takes effect when the ranks of pool `{record.pool}` start next"]
    return []


def future_pool(name: str, spec: PoolSpec, running: PoolRecord | None = None) -> PoolRecord:
    """A pool as it will report itself once it runs, on the devices of the one that runs now where there is one. Devices that do
    not run yet are known by `memory` only."""
    known = {rank.index: rank for rank in running.ranks} if running is not None and running.device == spec.device else {}
    ranks = [_rank(name, index, spec, known.get(index)) for index in range(spec.devices)]
    found = tuple(rank for rank in ranks if rank is not None)
    message = "" if len(found) == spec.devices else "its devices are known once it runs; give `memory` to plan before that"
    return PoolRecord(name, "", "", "", 0, spec.device, 0, 0, 0.0, ranks=found, message=message)


def _rank(pool: str, index: int, spec: PoolSpec, now: RankRecord | None) -> RankRecord | None:
    if now is None:
        return RankRecord(index, f"(a node for {pool})", 0, spec.device, spec.memory) if spec.memory is not None else None
    capacity = now.capacity_bytes if spec.memory is None else spec.memory
    return msgspec.structs.replace(now, capacity_bytes=capacity, ledger=now.taken, alive=True)


def restarting(
    before: Mapping[str, PoolSpec], after: Mapping[str, PoolSpec], running: Mapping[str, PoolRecord]
) -> dict[str, str]:
    """Running pools that start anew -> why."""
    both = before.keys() & after.keys() & running.keys()
    return {name: reason for name in sorted(both) if (reason := restart_reason(name, before[name], after[name]))}
