"""What placement reserves against what a pool driver budgets: a plan must not promise what the driver's ledger then refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from meta_models import meta_model, shape_of, tiny

from gateway.api.config import KvSpec, ModelSpec
from gateway.controller.model_requests import model_request
from placement.footprint import group_footprint
from placement.types import Measured, ModelShape
from workers.driver.effects import ModelFacts
from workers.driver.sizing import Placement, size_group

SHAPES = {
    "llama": shape_of(tiny("llama")),
    "7b": shape_of(meta_model(model_type="llama", intermediate_size=11008)),
    "qwen2": shape_of(meta_model(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                 num_attention_heads=14, num_key_value_heads=2)),
}  # fmt: skip


@dataclass(frozen=True)
class Read:
    """What the controller takes of a checkpoint."""

    shape: ModelShape
    max_context: int


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "int4"])
def test_the_driver_budgets_what_was_placed_to_the_byte(name: str, tensor: int, stages: int, device: str, precision: str) -> None:
    """rule 3: reserved on all ranks before it is mapped; rule 4: by the same bytes everywhere."""
    for stored in ("bf16", "fp32"):
        shape = replace(SHAPES[name], precision=stored, kv_bytes_per_element=4 if stored == "fp32" else 2)
        for kv in (
            KvSpec(),
            KvSpec(block_tokens=64),
            KvSpec(floor=10**9),
            KvSpec(ceiling=64 * 2**20),
            KvSpec(floor=10**9, ceiling=2 * 10**9, block_tokens=64),
        ):
            spec = ModelSpec(source="x", precision=precision, kv=kv)
            request = model_request(name, spec, Read(shape, shape.max_context))  # type: ignore[arg-type]
            held = stored if precision == "auto" else precision
            facts = ModelFacts(shape=shape, digest="", precision=held, max_context=shape.max_context, eos_ids=())
            ranks = tuple(range(tensor * stages))
            sizing = size_group(name, spec, facts, Placement(ranks, tensor, stages), device)
            placed = group_footprint(request, tensor, stages, device)
            for rank in ranks:
                assert sum(sizing.budget[rank].values()) == placed[rank // tensor].total
                assert sizing.floor_blocks * sizing.block_bytes[rank] == placed[rank // tensor].kv_floor
                assert all(size >= 0 for size in sizing.budget[rank].values())
                assert sizing.budget[rank]["weights"] >= 1.1 * placed[rank // tensor].weights
            assert sizing.floor_blocks <= sizing.ceiling_blocks


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_driver_reserves_what_was_measured_as_it_was_placed(name: str, tensor: int, stages: int, device: str) -> None:
    """rule 3, rule 4: less than the estimate or more, the plan and the ledger count one figure; it holds what was measured."""
    for share in (0.5, 1.0, 2.0):
        shape = replace(SHAPES[name], precision="bf16", kv_bytes_per_element=2)
        spec = ModelSpec(source="x", kv=KvSpec(floor=10**9 + 1))
        request = model_request(name, spec, Read(shape, shape.max_context))  # type: ignore[arg-type]
        estimate = group_footprint(request, tensor, stages, device)
        weights = tuple(int(stage.weights * share) + index for index, stage in enumerate(estimate))
        workspace = tuple(int(stage.workspace * share) + index for index, stage in enumerate(estimate))
        seen = Measured("torch", "auto", tensor, stages, device, weights, workspace, type="a card")
        placed = group_footprint(replace(request, measured=(seen,)), tensor, stages, device, "a card")
        facts = ModelFacts(shape=shape, digest="", precision="bf16", max_context=shape.max_context, eos_ids=())
        placement = Placement(tuple(range(tensor * stages)), tensor, stages)
        sizing = size_group(name, spec, facts, placement, device, measured=seen)
        again = size_group(name, spec, facts, placement, device, failed_attempts=1, measured=seen)
        for rank, budget in sizing.budget.items():
            stage = rank // tensor
            assert sum(budget.values()) == placed[stage].total
            assert budget["weights"] >= weights[stage]
            assert budget["workspace"] >= workspace[stage]
            assert sum(again.budget[rank].values()) > max(estimate[stage].total, placed[stage].total)
