"""Small GGUF files for tests, written by the `gguf` package (not by the code under test)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    vocabulary: int = 128,
    type_: GGMLQuantizationType = GGMLQuantizationType.Q4_0,
    head: bool = False,
    rope_scaling: tuple[str, float] | None = None,
    tokens: list[str] | None = None,
) -> Path:
    generator = np.random.default_rng(0)
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling[0])
        writer.add_rope_scaling_factor(rope_scaling[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens or [f"token{index}" for index in range(vocabulary)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int, kind: GGMLQuantizationType = type_) -> None:
        values = generator.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    plain = GGMLQuantizationType.F32
    add("token_embd.weight", vocabulary, hidden, kind=GGMLQuantizationType.Q8_0)
    for layer in range(layers):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", hidden, kind=plain)
        add(f"{block}.ffn_norm.weight", hidden, kind=plain)
        add(f"{block}.attn_q.weight", hidden, hidden)
        for name in ("attn_k", "attn_v"):
            add(f"{block}.{name}.weight", hidden // heads * kv_heads, hidden)
        add(f"{block}.attn_output.weight", hidden, hidden)
        add(f"{block}.ffn_gate.weight", intermediate, hidden)
        add(f"{block}.ffn_up.weight", intermediate, hidden)
        add(f"{block}.ffn_down.weight", hidden, intermediate)
    add("output_norm.weight", hidden, kind=plain)
    if head:
        add("output.weight", vocabulary, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
