"""GGUF tensor names and layouts by architecture, as Hugging Face checkpoints have them.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}
_DECODER_FOUR_NORMS = _DECODER | {
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.*.attn_norm": "transformer.h.*.ln_1",
    "blk.*.attn_qkv": "transformer.h.*.attn.c_attn",
    "blk.*.attn_output": "transformer.h.*.attn.c_proj",
    "blk.*.ffn_norm": "transformer.h.*.ln_2",
    "blk.*.ffn_up": "transformer.h.*.mlp.c_fc",
    "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
}


@dataclass(frozen=True)
class GgufLayout:
    names: dict[str, str]
    interleaved_rope: bool = False  # llama.cpp pairs neighbouring rows of q and k, transformers the two halves of a head
    norm_offset: float = 0.0  # what the converter added to norm weights


LAYOUTS: dict[str, GgufLayout] = {
    "llama": GgufLayout(_DECODER, interleaved_rope=True),
    "mistral": GgufLayout(_DECODER, interleaved_rope=True),
    "qwen2": GgufLayout(_DECODER),
    "qwen3": GgufLayout(_DECODER),
    "gemma": GgufLayout(_DECODER, norm_offset=1.0),
    "gemma2": GgufLayout(_DECODER_FOUR_NORMS, norm_offset=1.0),
    "gemma3": GgufLayout(_DECODER_FOUR_NORMS, norm_offset=1.0),
    "gpt2": GgufLayout(_GPT2),
}
# Held in the configuration instead, or recomputed.
DERIVED = {"rope_freqs.weight"}


def hugging_face_name(layout: GgufLayout, name: str) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None when the layout does not know it."""
    stem, _, kind = name.rpartition(".")
    block = re.match(r"blk\.(\d+)\.", stem)
    pattern = f"blk.*.{stem[block.end() :]}" if block else stem
    target = layout.names.get(pattern)
    if target is None:
        return None
    return f"{target.replace('*', block[1]) if block else target}.{kind}"
