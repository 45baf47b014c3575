"""What placement reserves against what a pool driver budgets: a plan must not promise what the driver's ledger then refuses."""

from __future__ import annotations

import pytest
from meta_models import meta_model, shape_of, tiny

from gateway.api.config import KvSpec, ModelSpec
from placement.footprint import group_footprint
from placement.types import ModelRequest
from workers.driver.effects import ModelFacts
from workers.driver.sizing import Placement, size_group

SHAPES = {
    "llama": shape_of(tiny("llama")),
    "7b": shape_of(meta_model(model_type="llama", intermediate_size=11008)),
    "qwen2": shape_of(meta_model(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                 num_attention_heads=14, num_key_value_heads=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "int4"])
def test_the_driver_never_budgets_more_than_was_placed(name: str, tensor: int, stages: int, device: str, precision: str) -> None:
    """rule 3: reserved on all ranks before it is mapped."""
    shape = SHAPES[name]
    for kv in (KvSpec(), KvSpec(floor=10**9), KvSpec(floor=10**9, ceiling=2 * 10**9, block_tokens=64)):
        spec = ModelSpec(source="x", precision=precision, kv=kv)
        request = ModelRequest(
            name, shape, context=shape.max_context, concurrency=spec.limits.concurrency, kv_floor_bytes=kv.floor,
            kv_ceiling_bytes=kv.ceiling, kv_block_tokens=kv.block_tokens,
            batch_tokens=spec.limits.batch_tokens, precision=spec.precision,
        )  # fmt: skip
        held = "fp32" if precision == "fp32" else "bf16"
        facts = ModelFacts(shape=shape, digest="", precision=held, max_context=shape.max_context, eos_ids=())
        ranks = tuple(range(tensor * stages))
        sizing = size_group(name, spec, facts, Placement(ranks, tensor, stages), device)
        for rank, stage in ((rank, rank // tensor) for rank in ranks):
            placed = group_footprint(request, tensor, stages, device)[stage]
            assert sum(sizing.budget[rank].values()) <= placed.total
