from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trtllm_environment import make_environment

MIB = 2**20


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """`environment(version, **settings)`: the interpreter of an environment with the stand-in."""

    def make(version: str = "1.4.0rc1", **settings: object) -> Path:
        return make_environment(tmp_path / f"env-{version}", version, **settings)

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Hugging Face directory of 4 MiB, of random numbers."""
    return write_checkpoint(tmp_path / "checkpoint")


def write_checkpoint(directory: Path, layers: int = 2, hidden: int = 128, vocabulary: int = 512) -> Path:
    directory.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * hidden, "vocab_size": vocabulary,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        kv = hidden // 2
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden), f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden), f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (2 * hidden, hidden), f"{prefix}.mlp.up_proj.weight": (2 * hidden, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, 2 * hidden), f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}, directory / "model.safetensors"
    )
    return directory
