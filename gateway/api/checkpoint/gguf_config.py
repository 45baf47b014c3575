"""A Hugging Face configuration for a GGUF file, from its metadata. One row per architecture; keys common to all in one table.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and transformers' `integrations/ggml.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.api.checkpoint.gguf_header import GgufHeader
from gateway.api.errors import invalid


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    class_name: str
    fixed: dict[str, Any] = field(default_factory=dict)  # what the architecture implies and the file does not say
    renames: dict[str, str] = field(default_factory=dict)  # where the family's config names a common key differently


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", {"hidden_act": "silu"}),
    "mistral": _Architecture("mistral", "MistralForCausalLM", {"hidden_act": "silu"}),
    "mixtral": _Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {"hidden_act": "silu"},
        {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    ),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen2moe": _Architecture("qwen2_moe", "Qwen2MoeForCausalLM", {"hidden_act": "silu"}),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {"hidden_act": "silu", "norm_topk_prob": True}),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", _GEMMA),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", {"hidden_act": "silu"}),
    "gpt2": _Architecture("gpt2", "GPT2LMHeadModel", {"activation_function": "gelu_new"}, _GPT2_NAMES),
}

_COMMON_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_REQUIRED = ("max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads")
# Llama 3.1 and later: their other three scaling constants are the same in every released checkpoint.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Content of the `config.json` that the original checkpoint had. YardError when the architecture is not known."""
    architecture = _architecture(header)
    config: dict[str, Any] = {}
    for key, name in _COMMON_KEYS.items():
        value = header.of_architecture(key)
        if value is not None:
            config[name] = _tidy(value)
    missing = [name for name in _REQUIRED if name not in config]
    if missing:
        raise invalid(f"{header.path}: its metadata lacks {', '.join(missing)}; convert the file again", field="source")
    if isinstance(config.get("intermediate_size"), list):
        config["intermediate_size"] = max(config["intermediate_size"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    names = {tensor.name: tensor for tensor in header.tensors}
    embedding = names.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else header.count("tokenizer.ggml.tokens")
    config["tie_word_embeddings"] = "output.weight" not in names
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    config |= _rope(header)
    for name in ("bos", "eos", "padding"):
        config[f"{'pad' if name == 'padding' else name}_token_id"] = header.get(f"tokenizer.ggml.{name}_token_id")
    config |= architecture.fixed
    config = {architecture.renames.get(name, name): value for name, value in config.items()}
    return {"model_type": architecture.model_type, "architectures": [architecture.class_name], **config}


def _architecture(header: GgufHeader) -> _Architecture:
    name = header.architecture
    # llama.cpp writes Mixtral, and some converters Mistral, under the name llama; the tensors are the same.
    if name == "llama" and header.of_architecture("expert_count", 0):
        name = "mixtral"
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        problem = f"architecture {name} cannot be read from GGUF (can be: {known})"
        raise invalid(f"{header.path}: {problem}; use the model's Hugging Face directory instead", field="source")
    return _ARCHITECTURES[name]


def _rope(header: GgufHeader) -> dict[str, Any]:
    theta = header.of_architecture("rope.freq_base")
    if theta is None:
        return {} if header.architecture == "gpt2" else {"rope_theta": 10000.0}
    config: dict[str, Any] = {"rope_theta": _tidy(theta)}
    kind = header.of_architecture("rope.scaling.type")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": _tidy(header.of_architecture("rope.scaling.factor", 1.0))}
        original = header.of_architecture("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        config["rope_scaling"] = scaling
    factors = next((tensor for tensor in header.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        # The file holds the factor of every frequency; the lowest ones carry the whole scaling.
        values = np.fromfile(factors.file, dtype="<f4", count=factors.elements, offset=factors.offset)
        config["rope_scaling"] = {"rope_type": "llama3", "factor": _tidy(values.max()), **_LLAMA3_ROPE}
    return config


def _tidy(value: Any) -> Any:
    """GGUF floats are 32-bit: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, (float, np.floating)) else value
