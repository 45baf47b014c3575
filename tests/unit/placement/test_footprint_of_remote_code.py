"""Families whose modules transformers does not have: Baichuan and ChatGLM, as their checkpoints name and shape their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meta_models import MetaTensor

from gateway.api.checkpoint.shape import read_shape
from placement.footprint import weight_bytes
from placement.types import ModelRequest

HIDDEN, HEADS, HEAD_DIM, WIDE, VOCABULARY, LAYERS = 64, 4, 16, 96, 128, 3
BAICHUAN = {
    "model_type": "baichuan", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": WIDE, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip
CHATGLM = {
    "model_type": "chatglm", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_layers": LAYERS, "ffn_hidden_size": WIDE,
    "padded_vocab_size": VOCABULARY, "kv_channels": HEAD_DIM, "multi_query_attention": True, "multi_query_group_num": 2,
    "seq_length": 256, "tie_word_embeddings": False,
}  # fmt: skip


def baichuan(shards: int = 1) -> dict[str, torch.Tensor]:
    """The fused projection has as many keys and values as queries."""
    width = HEADS * HEAD_DIM // shards
    tensors = {"model.embed_tokens.weight": (VOCABULARY // shards, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.W_pack.weight": (3 * width, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, width),
            f"{prefix}mlp.gate_proj.weight": (WIDE // shards, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (WIDE // shards, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE // shards),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    return _allocated({**tensors, "lm_head.weight": (VOCABULARY // shards, HIDDEN)})


def chatglm(shards: int = 1) -> dict[str, torch.Tensor]:
    """Two KV heads; the fused projection has biases, the MLP's first matrix is gate and up in one."""
    width = (HEADS + 2 * 2) * HEAD_DIM // shards
    tensors = {
        "transformer.embedding.word_embeddings.weight": (VOCABULARY // shards, HIDDEN),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (VOCABULARY // shards, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"transformer.encoder.layers.{layer}."
        tensors |= {
            f"{prefix}self_attention.query_key_value.weight": (width, HIDDEN),
            f"{prefix}self_attention.query_key_value.bias": (width,),
            f"{prefix}self_attention.dense.weight": (HIDDEN, HEADS * HEAD_DIM // shards),
            f"{prefix}mlp.dense_h_to_4h.weight": (2 * WIDE // shards, HIDDEN),
            f"{prefix}mlp.dense_4h_to_h.weight": (HIDDEN, WIDE // shards),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    return _allocated(tensors)


def _allocated(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize(("config", "tensors"), [(BAICHUAN, baichuan), (CHATGLM, chatglm)], ids=["baichuan", "chatglm"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_shard_is_what_torch_allocates_for_it(config: dict[str, Any], tensors: Any, shards: int) -> None:
    stored = {**tensors(), "transformer.rotary_pos_emb.inv_freq": torch.empty(8, dtype=torch.bfloat16)}  # which engines compute
    shape = read_shape(
        config,
        [MetaTensor(name, tuple(each.shape), each.numel(), each.nbytes) for name, each in stored.items()],
        "bf16",
        resident_as_stored=True,
    )
    assert shape.layers == LAYERS
    request = ModelRequest("m", shape, engine="trtllm")
    assert weight_bytes(request, shards, 1, 0) == sum(each.nbytes for each in tensors(shards).values())
