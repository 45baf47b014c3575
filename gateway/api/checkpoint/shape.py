"""From a configuration and a list of tensors to what placement must know (`placement.types.ModelShape`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from gateway.api.checkpoint.pooling import first_position, is_encoder
from gateway.api.checkpoint.tensor_roles import Role, role_of
from gateway.api.errors import invalid
from placement.types import ModelShape, Split, WeightPart

Parts = tuple[WeightPart, ...]


class StoredTensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def elements(self) -> int: ...
    @property
    def bytes(self) -> int: ...


def read_shape(
    config: dict[str, Any], tensors: Iterable[StoredTensor], precision: str, *, resident_as_stored: bool
) -> ModelShape:
    """YardError(INVALID) when the configuration does not say what it must."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    encoder = is_encoder(text)
    kv_heads = 1 if encoder else _kv_heads(text, heads)
    places: dict[str | int, list[tuple[Role, StoredTensor]]] = defaultdict(list)
    for tensor in tensors:
        role = role_of(tensor.name)
        # Layers beyond the last one predict further tokens ahead; no engine here runs them.
        if role is not None and not (isinstance(role.place, int) and role.place >= layers):
            places[role.place].append((role, tensor))
    intern: dict[Parts, Parts] = {}
    layer_parts = [_parts(places[layer], heads, kv_heads) for layer in range(layers)]
    embedding, head, final = (_parts(places[name], heads, kv_heads) for name in ("embedding", "head", "final"))
    tied = bool(text.get("tie_word_embeddings", False)) or not head
    if tied or encoder:
        head = ()
    return ModelShape(
        family=str(text.get("model_type", "unknown")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=1 if encoder else _head_dim(text, hidden // heads),
        intermediate=_number(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden),
        vocabulary=_number(text, "vocab_size", "padded_vocab_size"),
        max_context=_number(text, "max_position_embeddings", "n_positions", "seq_length", "n_ctx", default=2048)
        - (first_position(text) if encoder else 0),
        tied_embeddings=tied and not encoder,
        layer_bytes=tuple(_bytes(parts) for parts in layer_parts),
        embedding_bytes=_bytes(embedding) + _bytes(final),
        head_bytes=_bytes(head),
        kv_bytes_per_element=4 if precision == "fp32" else 2,
        layer_parts=tuple(intern.setdefault(parts, parts) for parts in layer_parts),
        embedding_parts=embedding,
        head_parts=head,
        final_parts=final,
        precision=precision,
        resident_as_stored=resident_as_stored,
        expert_intermediate=_experts_width(text),
        experts=_first(text, "num_local_experts", "num_experts", "n_routed_experts"),
        experts_per_token=_first(text, "num_experts_per_tok", "moe_topk"),
        layer_windows=_windows(text, layers),
        encoder=encoder,
        latent_elements=int(text.get("kv_lora_rank") or 0) and int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0),
    )


def _parts(tensors: list[tuple[Role, StoredTensor]], heads: int, kv_heads: int) -> Parts:
    sums: dict[tuple[Split, bool], list[int]] = {}
    for role, tensor in tensors:
        matrix = len(tensor.shape) > 1 and role.convertible
        for split, numerator, denominator in _shares(role, heads, kv_heads):
            total = sums.setdefault((split, matrix), [0, 0])
            total[0] += tensor.elements * numerator // denominator
            total[1] += tensor.bytes * numerator // denominator
    return tuple(WeightPart(split, matrix, *sums[split, matrix]) for split, matrix in sorted(sums) if sums[split, matrix][0])


def _shares(role: Role, heads: int, kv_heads: int) -> list[tuple[Split, int, int]]:
    """A fused q/k/v projection is part by attention heads, part by KV heads."""
    if role.split != "qkv":
        return [(role.split, 1, 1)]
    return [("heads", heads, heads + 2 * kv_heads), ("kv_heads", 2 * kv_heads, heads + 2 * kv_heads)]


def _bytes(parts: Parts) -> int:
    return sum(part.bytes for part in parts)


def _kv_heads(config: dict[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # Falcon-7B, GPT-BigCode
    if config.get("multi_query_attention"):
        return _number(config, "multi_query_group_num")  # ChatGLM
    return _number(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)


def _head_dim(config: dict[str, Any], default: int) -> int:
    """With latent attention expanded to heads: keys are the wider ones."""
    if config.get("kv_lora_rank"):
        return int(config.get("qk_nope_head_dim") or 0) + int(config.get("qk_rope_head_dim") or 0)
    return _number(config, "head_dim", "kv_channels", default=default)


def _experts_width(config: dict[str, Any]) -> int:
    if not _first(config, "num_local_experts", "num_experts", "n_routed_experts"):
        return 0
    return _number(config, "moe_intermediate_size", "intermediate_size")


def _first(config: dict[str, Any], *names: str) -> int:
    """0 when it has none of them."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or config.get("use_sliding_window") is False:
        return ()
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    pattern = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(str(config.get("model_type")), 0)
    return tuple(0 if pattern and (layer + 1) % int(pattern) == 0 else window for layer in range(layers))


def _number(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is None:
        family = config.get("model_type", "unknown")
        raise invalid(f"the configuration of this {family} model has no {' or '.join(names)}; correct its config.json")
    return default
