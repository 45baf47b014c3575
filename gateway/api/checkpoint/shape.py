"""From a configuration and a list of tensors to what placement must know (`placement.types.ModelShape`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

from gateway.api.errors import invalid
from placement.types import ModelShape

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|token_embd|wte|word_embeddings|embed_in)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out)\.(?:weight|bias)$|^output_layer\.")


class StoredTensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...


def read_shape(config: dict[str, Any], tensors: Iterable[StoredTensor]) -> ModelShape:
    """YardError(INVALID) when the configuration does not say what it must."""
    text = config.get("text_config", config)
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    layer_bytes = [0] * layers
    embedding_bytes = head_bytes = other_bytes = 0
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match and int(match[1]) < layers:
            layer_bytes[int(match[1])] += tensor.bytes
        elif _EMBEDDING.search(tensor.name):
            embedding_bytes += tensor.bytes
        elif _HEAD.search(tensor.name):
            head_bytes += tensor.bytes
        else:
            other_bytes += tensor.bytes
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))) or not head_bytes
    return ModelShape(
        family=str(config.get("model_type", "unknown")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads", default=heads),
        head_dim=_number(text, "head_dim", default=hidden // heads),
        intermediate=_number(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocabulary=_number(text, "vocab_size"),
        max_context=_number(text, "max_position_embeddings", "n_positions", "seq_length", "n_ctx", default=2048),
        tied_embeddings=tied,
        layer_bytes=tuple(layer_bytes),
        embedding_bytes=embedding_bytes + other_bytes,
        head_bytes=0 if tied else head_bytes,
    )


def _number(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is None:
        family = config.get("model_type", "unknown")
        raise invalid(f"the configuration of this {family} model has no {' or '.join(names)}; correct its config.json")
    return default
