from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from meta_models import TINY, meta_model, shape_of, tiny

from placement.footprint import PAGE_BYTES, group_footprint, kv_bytes, weight_bytes
from placement.split import VOCABULARY_ALIGNMENT, tensor_parallel_problem
from placement.types import Measured, ModelRequest, ModelShape
from workers.memory.kv_layout import block_bytes, stage_layers

GIB = 2**30
SPLITS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


def whole(shape: ModelShape, precision: str = "auto") -> ModelRequest:
    """For the engine that keeps a checkpoint as it is stored."""
    return ModelRequest("m", shape, engine="trtllm", precision=precision)


def allocated(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("family", TINY)
def test_one_rank_holds_what_torch_allocates(family: str) -> None:
    model = tiny(family)
    shape = shape_of(model)
    assert weight_bytes(whole(shape), 1, 1, 0) == allocated(model)
    assert sum(shape.layer_bytes) + shape.embedding_bytes + shape.head_bytes == allocated(model)
    assert weight_bytes(whole(shape, "fp32"), 1, 1, 0) == sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", TINY)
def test_pipeline_stages_add_up(family: str) -> None:
    """Tied embeddings are held twice: looked up by the first stage, multiplied with by the last."""
    model = tiny(family)
    shape = shape_of(model)
    held = sum(weight_bytes(whole(shape), 1, 3, stage) for stage in range(3))
    tied = sum(part.bytes for part in shape.embedding_parts if part.split == "vocabulary") if shape.tied_embeddings else 0
    assert held == allocated(model) + tied


def test_no_tensor_of_a_layer_is_left_whole_but_norms_and_routers() -> None:
    """A name that is not known would be counted on every shard: safe, and far too much."""
    for family in TINY:
        shape = shape_of(tiny(family))
        for parts in shape.layer_parts:
            whole = sum(part.bytes for part in parts if part.split == "replicated")
            # DeepSeek's down-projections to the latent are whole on every shard by design.
            limit = 0.35 if family == "deepseek_v3" else 0.04
            assert whole <= limit * sum(part.bytes for part in parts), family


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(4, 2, 2), (4, 4, 2), (8, 2, 4), (6, 3, 3), (8, 8, 8)])
def test_a_tensor_parallel_shard_is_what_torch_allocates_for_it(heads: int, kv_heads: int, degree: int, tied: bool) -> None:
    """Every parameter cut as Megatron cuts it, and the pieces allocated."""
    model = tiny(
        "llama", hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=24 * degree,
        vocab_size=100, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, num_hidden_layers=2,
    )  # fmt: skip
    total = 0
    rows = math.ceil(math.ceil(100 / degree) / VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
    for name, parameter in model.named_parameters():
        module, kind = name.split(".")[-2:]
        size = list(parameter.shape)
        if module in ("embed_tokens", "lm_head"):
            size[0] = rows
        elif module in SPLITS and not (kind == "bias" and SPLITS[module] == 1):
            pieces = min(degree, kv_heads) if module in ("k_proj", "v_proj") else degree
            size[SPLITS[module]] //= pieces
        piece = torch.empty(size, dtype=parameter.dtype)
        total += piece.untyped_storage().nbytes()
    assert weight_bytes(whole(shape_of(model)), degree, 1, 0) == total


@pytest.mark.parametrize(
    ("name", "low_gb", "high_gb", "config"),
    [
        ("Llama 2 7B", 13, 14, {"model_type": "llama", "intermediate_size": 11008}),
        (
            "Llama 3.1 70B", 140, 142,
            {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
        ),
        ("Mistral 7B", 14, 15, {"model_type": "mistral", "intermediate_size": 14336}),
        ("Mixtral 8x7B", 93, 94, {"model_type": "mixtral", "intermediate_size": 14336}),
        (
            "Qwen2 7B", 15, 15.5,
            {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
             "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
        ),
        (
            "Qwen3 30B-A3B", 60, 62,
            {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
             "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "vocab_size": 151936},
        ),
        ("Gemma 7B", 17, 17.2, {"model_type": "gemma"}),
        ("GPT-2", 0.24, 0.26, {"model_type": "gpt2"}),
        ("GPT-J 6B", 12, 12.2, {"model_type": "gptj"}),
        ("GPT-NeoX 20B", 41, 41.5, {"model_type": "gpt_neox"}),
        ("BLOOM 7B1", 14, 14.2, {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32}),
        ("Falcon 7B", 13.8, 14.5, {"model_type": "falcon"}),
        (
            "Phi-2", 5.5, 5.6,
            {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32},
        ),
        ("DeepSeek V3", 1340, 1345, {"model_type": "deepseek_v3"}),
    ],
)  # fmt: skip
def test_public_totals_in_16_bits(name: str, low_gb: float, high_gb: float, config: dict) -> None:
    assert low_gb <= weight_bytes(whole(shape_of(meta_model(**config))), 1, 1, 0) / 1e9 <= high_gb


@pytest.mark.parametrize(
    ("config", "engine", "bytes_per_token"),
    [
        ({"model_type": "llama", "num_hidden_layers": 32}, "torch", 512 * 1024),  # Llama 2 7B
        ({"model_type": "mistral"}, "torch", 128 * 1024),  # grouped, 8 KV heads
        ({"model_type": "falcon"}, "torch", 8 * 1024),  # one KV head of 64
        ({"model_type": "gpt2"}, "torch", 36 * 1024),
        ({"model_type": "deepseek_v3"}, "trtllm", 61 * 576 * 2),  # latent
    ],
)
def test_kv_per_token(config: dict, engine: str, bytes_per_token: int) -> None:
    request = ModelRequest("m", shape_of(meta_model(**config)), engine=engine)
    assert kv_bytes(request, 1, 1, 0, 1) == bytes_per_token


def test_a_sliding_window_bounds_what_tensorrt_keeps() -> None:
    shape = shape_of(tiny("mistral", sliding_window=32))
    assert shape.layer_windows == (32, 32, 32)
    windowed, whole = (ModelRequest("m", shape, engine=engine) for engine in ("trtllm", "torch"))
    assert kv_bytes(windowed, 1, 1, 0, 1000) == kv_bytes(whole, 1, 1, 0, 32)
    assert kv_bytes(whole, 1, 1, 0, 1000) == 1000 * kv_bytes(whole, 1, 1, 0, 1)
    assert shape_of(tiny("gemma2", sliding_window=32)).layer_windows == (32, 0, 32)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), (2, 3), (4, 1)])
def test_kv_is_budgeted_as_it_is_laid_out(tensor: int, stages: int) -> None:
    """rule 4: bytes. Placement's figure and the layout that driver and engines share must be one."""
    shape = shape_of(tiny("llama"))
    request = ModelRequest("m", shape, context=512, kv_floor_bytes=0)
    for stage, footprint in enumerate(group_footprint(request, tensor, stages, "cpu")):
        layers = len(stage_layers(shape.layers, stages, stage))
        assert footprint.kv_floor == 512 // 16 * block_bytes(shape, layers, tensor, 16)


def test_the_kv_floor_holds_one_full_context_and_obeys_the_ceiling() -> None:
    shape = shape_of(tiny("llama"))
    one = 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head size, bytes
    request = ModelRequest("m", shape, context=100, kv_floor_bytes=10)
    assert group_footprint(request, 1, 1, "cpu")[0].kv_floor == 112 * one  # whole blocks of 16
    large = dataclasses.replace(request, kv_floor_bytes=10_000 * one)
    assert group_footprint(large, 1, 1, "cpu")[0].kv_floor == 10_000 * one
    capped = dataclasses.replace(large, kv_ceiling_bytes=200 * one)
    assert group_footprint(capped, 1, 1, "cpu")[0].kv_floor == 192 * one
    # Uneven stages hold the same tokens.
    first, second = (stage.kv_floor for stage in group_footprint(large, 1, 2, "cpu"))
    assert first == 2 * second


def test_degrees_that_cut_through_a_head_are_refused_with_the_reason() -> None:
    shape = shape_of(meta_model(model_type="llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9,
                                num_key_value_heads=3, num_hidden_layers=2))  # fmt: skip
    assert [degree for degree in range(1, 10) if tensor_parallel_problem(shape, degree) is None] == [1, 3]
    assert tensor_parallel_problem(shape, 2) == "its 9 attention heads do not divide by 2"


def test_what_was_measured_replaces_the_estimate_of_the_same_sort_only() -> None:
    shape = shape_of(tiny("llama"))
    seen = Measured("torch", "auto", 1, 2, "cpu", weights=(111, 222), workspace=(3, 4))
    request = ModelRequest("m", shape, context=64, measured=(seen,))
    stages = group_footprint(request, 1, 2, "cpu")
    assert [(stage.weights, stage.workspace, stage.communication, stage.measured) for stage in stages] == [
        (111, 3, 0, True),
        (222, 4, 0, True),
    ]
    assert all(stage.total % PAGE_BYTES["cpu"] == 0 for stage in stages)
    plain = dataclasses.replace(request, measured=())
    assert [stage.kv_floor for stage in stages] == [stage.kv_floor for stage in group_footprint(plain, 1, 2, "cpu")]
    for other in (dataclasses.replace(request, precision="fp32"), dataclasses.replace(request, engine="trtllm")):
        assert group_footprint(other, 1, 2, "cpu")[0].weights != 111
    assert group_footprint(request, 1, 1, "cpu") == group_footprint(plain, 1, 1, "cpu")
    assert group_footprint(request, 1, 2, "cuda") == group_footprint(plain, 1, 2, "cuda")


def test_what_was_measured_counts_on_its_type_of_gpu_only() -> None:
    seen = Measured("torch", "auto", 1, 1, "cuda", weights=(111,), workspace=(3,), type="H200")
    request = ModelRequest("m", shape_of(tiny("llama")), context=64, measured=(seen,))
    assert group_footprint(request, 1, 1, "cuda", "H200")[0].measured
    assert not group_footprint(request, 1, 1, "cuda", "L4")[0].measured
    assert not group_footprint(request, 1, 1, "cuda")[0].measured  # it may go to either
