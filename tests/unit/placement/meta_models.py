"""Shapes of real model families, from transformers' own modules on the meta device: names and sizes without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gateway.api.checkpoint.shape import read_shape
from placement.types import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class MetaTensor:
    name: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


def meta_model(dtype: str = "bf16", **config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=DTYPES[dtype])


def shape_of(model: torch.nn.Module, precision: str = "bf16") -> ModelShape:
    """As `open_checkpoint` reads it from the saved model: tied tensors are saved once."""
    tensors = [
        MetaTensor(name, tuple(value.shape), value.numel(), value.numel() * value.element_size())
        for name, value in model.named_parameters()
    ]
    return read_shape(model.config.to_dict(), tensors, precision, resident_as_stored=True)


TINY = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 96, "num_key_value_heads": 2},
    "mixtral": {"intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"intermediate_size": 96, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2_moe": {
        "intermediate_size": 96, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        "intermediate_size": 96, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16,
    },
    "gemma": {"intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {},
    "gptj": {"rotary_dim": 8},
    "gpt_neox": {"intermediate_size": 96},
    "bloom": {},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 1},
    "phi": {"intermediate_size": 96, "num_key_value_heads": 4},
    "phi3": {"intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": 0},
    "glm": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    "glm4": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    "deepseek_v3": {
        "intermediate_size": 96, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 256}
_GPT_SIZES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 256}


def tiny(family: str, **changes: Any) -> torch.nn.Module:
    sizes = _GPT_SIZES if family in ("gpt2", "gptj") else _SIZES
    if family == "bloom":
        sizes = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128}
    return meta_model(model_type=family, **{**sizes, **TINY[family], **changes})
