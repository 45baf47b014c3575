"""Small random checkpoints of every family, saved as transformers saves them, and what transformers answers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 160
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama-tied-bias": LlamaConfig(**_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**_SHAPE, sliding_window=20),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-sliding": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=2),
    "qwen3": Qwen3Config(**_SHAPE),
    "gemma": GemmaConfig(**_SHAPE),
    "gemma2": Gemma2Config(**_SHAPE, sliding_window=20, query_pre_attn_scalar=256),
    "gemma3": Gemma3TextConfig(
        **_SHAPE, sliding_window=20, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "phi3": Phi3Config(**{name: value for name, value in _SHAPE.items() if name != "head_dim"}),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
}


def save_random(family: str, directory: Path, scale: float = 6.0, dtype: torch.dtype = torch.float32) -> Path:
    """Weights wide enough that answers depend on all of the prompt and near-ties are rare."""
    torch.manual_seed(len(family))
    model = Auto.from_config(FAMILIES[family], dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(scale)
            elif name.endswith("bias") or parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """transformers' own answer in fp32; it never stops early."""
    return generate(Auto.from_pretrained(directory, dtype=torch.float32).eval(), prompt, count)


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
        )
    return ids[0, len(prompt) :].tolist()
