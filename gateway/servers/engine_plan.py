"""What a plan says of TensorRT-LLM models: what the version in their pool lacks, and what leaving and coming back costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint, resolve
from gateway.api.config import EngineSpec, ModelSpec
from gateway.api.errors import YardError
from gateway.api.proto.admin_pb2 import Placement
from gateway.api.records import PoolRecord
from gateway.api.trtllm.arguments import problems
from gateway.api.trtllm.demand import demand_of
from gateway.api.trtllm.features import park_method
from gateway.api.trtllm.manifest import refuse_misfit
from gateway.state.view import ModelEntry


async def with_engine_notes(
    rows: Iterable[Placement], models: Mapping[str, ModelEntry], pools: Mapping[str, PoolRecord], cache_dir: Path
) -> list[Placement]:
    """The rows, those that cannot be with action `none` and the reasons: before anything is stopped for them."""
    noted = []
    for row in rows:
        entry = models.get(row.model)
        if entry is None or entry.spec.engine != "trtllm" or row.action in ("none", "unload"):
            noted.append(row)
            continue
        found, notes = await asyncio.to_thread(_judge, row, entry.spec, pools.get(row.pool), cache_dir)
        if found:
            noted.append(Placement(model=row.model, pool=row.pool, action="none", reasons=found))
            continue
        row.reasons.extend(notes)
        noted.append(row)
    return noted


def _judge(row: Placement, spec: ModelSpec, pool: PoolRecord | None, cache_dir: Path) -> tuple[list[str], list[str]]:
    """(why it cannot be, what else is worth knowing)"""
    engine = pool.trtllm if pool is not None else None
    if engine is None or pool is None:
        return [], [f"pool `{row.pool}` has not said yet what its TensorRT-LLM can do; plan again once it runs"]
    if engine.features is None:
        return [engine.problem or "its TensorRT-LLM is still being asked what it can do"], []
    settings = EngineSpec.model_validate_json(engine.settings_json)
    try:
        refuse_misfit(row.model, resolve(spec.source), engine.features)
        checkpoint = open_checkpoint(spec.source, cache_dir)
        found = problems(demand_of(row.model, spec, checkpoint, 1, len(row.ranks)), engine.features, settings)
    except YardError as error:
        return [error.message], []
    method = park_method(engine.features, world=len(row.ranks), orchestrator=settings.orchestrator, wanted=settings.park)
    if found or method != "reload" or spec.residency == "resident":
        return found, []
    loads = next((record.median_s for record in pool.switches if record.path == "load"), None)
    cost = f"{loads:.0f} s by the pool's loads so far" if loads is not None else "minutes, until a load has been measured"
    return [], [f"TensorRT-LLM {engine.features.version} does not park it here: each switch to it is a load, {cost}"]
