"""What a tensor is, by its name: which layer it belongs to and how tensor parallelism divides it.

Names of Hugging Face checkpoints (Llama, Mistral, Mixtral, Qwen, Gemma, Phi, GPT-2, GPT-J, GPT-NeoX, BLOOM, Falcon, Baichuan,
ChatGLM, GLM, DeepSeek, OPT, StarCoder) and of GGUF. The divisions are Megatron's: q/k/v and the first MLP matrices by output,
the attention output and the last MLP matrix by input, whose biases are then added once and so are whole on every shard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from placement.types import Split

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blk|blocks)\.(\d+)\.(.+)$")
_SUFFIX = re.compile(r"\.(weight|bias|qweight|qzeros|scales|g_idx|weight_scale|weight_scale_inv|input_scale|weight_scale_2)$")
# Buffers that checkpoints carry and engines compute.
_IGNORED = re.compile(r"(?:^|\.)(?:attn|attention)\.(?:bias|masked_bias)$|rotary_emb\.inv_freq$|rotary_pos_emb|rope_freqs")

_QKV = ("query_key_value", "qkv_proj", "c_attn", "W_pack", "attn_qkv", "Wqkv", "qkv")
_HEADS_OUT = ("q_proj", "attn_q", "q_b_proj", "kv_b_proj", "attn_q_b", "attn_kv_b")
_KV_OUT = ("k_proj", "v_proj", "attn_k", "attn_v")
_HEADS_IN = ("o_proj", "attn_output", "out_proj", "attn.c_proj", "attention.dense", "self_attention.dense", "self_attn.dense")
_WIDE_OUT = (
    "gate_proj", "up_proj", "gate_up_proj", "ffn_gate", "ffn_up", "c_fc", "dense_h_to_4h", "fc_in", "fc1", "w1", "w3",
    "ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp", "wi",
)  # fmt: skip
_WIDE_IN = (
    "down_proj", "ffn_down", "mlp.c_proj", "dense_4h_to_h", "fc_out", "fc2", "w2", "ffn_down_exps", "ffn_down_shexp", "wo",
)  # fmt: skip

_EMBEDDING = ("embed_tokens", "token_embd", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_EMBEDDING_EXTRAS = ("wpe", "embed_positions", "position_embd", "word_embeddings_layernorm", "token_embd_norm", "project_in")
_HEAD = ("lm_head", "output", "embed_out", "output_layer")


@dataclass(frozen=True)
class Role:
    place: int | Literal["embedding", "head", "final"]
    split: Split | Literal["qkv"]
    convertible: bool = True  # False: already packed by a quantizer, or a router, which stays as it is


def role_of(name: str) -> Role | None:
    """None for what no engine loads."""
    if _IGNORED.search(name):
        return None
    layer = _LAYER.search(name)
    if layer:
        return Role(int(layer[1]), *_in_layer(layer[2]))
    module, kind = _module(name)
    if _ends_with(module, _EMBEDDING):
        return Role("embedding", "vocabulary")
    if _ends_with(module, _EMBEDDING_EXTRAS):
        return Role("embedding", "replicated")
    if _ends_with(module, _HEAD):
        return Role("head", "vocabulary")
    return Role("final", "replicated", kind == "weight")


def _in_layer(name: str) -> tuple[Split | Literal["qkv"], bool]:
    module, kind = _module(name)
    plain = kind in ("weight", "bias", "")
    if kind == "g_idx":
        return "replicated", False
    if _ends_with(module, _QKV):
        return "qkv", plain
    if _ends_with(module, _HEADS_OUT):
        return "heads", plain
    if _ends_with(module, _KV_OUT):
        return "kv_heads", plain
    if _ends_with(module, _HEADS_IN):
        return ("replicated" if kind == "bias" else "heads"), plain
    if _ends_with(module, _WIDE_IN):
        return ("replicated" if kind == "bias" else "hidden"), plain
    if _ends_with(module, _WIDE_OUT):
        return "hidden", plain
    return "replicated", plain


def _module(name: str) -> tuple[str, str]:
    match = _SUFFIX.search(name)
    return (name[: match.start()], match[1]) if match else (name, "")


def _ends_with(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith("." + name) for name in names)
