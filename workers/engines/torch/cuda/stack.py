"""The layers of a stage, from embedded tokens to normalised hidden states: as transformers runs them, or with fewer kernels.

`FusedStack` is built from the filled modules of families whose layers are known to compute exactly this; each layer is ten
kernels there. All others run through transformers' own forward pass over our linears, norms and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from workers.engines.torch.attention import AttentionRule
from workers.engines.torch.cuda import attention as plain
from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.attention import Attention, Current, Slot
from workers.engines.torch.cuda.batch import Tokens
from workers.engines.torch.cuda.kv import BlockMajorKv
from workers.engines.torch.cuda.linear import GpuLinear, GpuRmsNorm
from workers.engines.torch.linear import ProjectionPart
from workers.engines.torch.stage import StageModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length

BeforeLayer = Callable[[int], None]


class Stack(Protocol):
    rules: list[AttentionRule]  # of its attention, as far as known beforehand

    def __call__(self, hidden: torch.Tensor, tokens: Tokens, before_layer: BeforeLayer | None) -> torch.Tensor:
        """hidden [tokens, hidden], which may be overwritten → the same after this stage's layers (and the last one's norm).

        `before_layer(i)` runs before anything of layer i is enqueued (the number of layers stands for what comes after them).
        """
        ...


class TransformersStack:
    def __init__(self, stage: StageModel, kv: BlockMajorKv, attention: Attention) -> None:
        self.rules = []
        self._base = stage.base
        self._layers = stage.layers
        self._current = Current()
        stage.base.config._attn_implementation = plain.ATTENTION
        for layer, module in enumerate(getattr(stage.base, stage.names.layers)):
            for part in module.modules():
                if hasattr(part, "layer_idx") and hasattr(part, "head_dim"):
                    part.paged = Slot(layer, kv, attention, self._current)

    def __call__(self, hidden: torch.Tensor, tokens: Tokens, before_layer: BeforeLayer | None) -> torch.Tensor:
        if before_layer is not None:
            before_layer(self._layers)
        self._current.tokens = tokens
        positions = tokens.positions.long().unsqueeze(0)
        try:
            out = self._base(inputs_embeds=hidden.unsqueeze(0), position_ids=positions, use_cache=False)
        finally:
            self._current.tokens = None
        return out.last_hidden_state[0]


@dataclass(frozen=True)
class _Layer:
    norm_attention: GpuRmsNorm
    qkv: GpuLinear
    rotation: ops.Rotation
    rule: AttentionRule
    output: nn.Module
    norm_mlp: GpuRmsNorm
    gate_up: GpuLinear
    down: nn.Module


class FusedStack:
    def __init__(self, layers: list[_Layer], norm: GpuRmsNorm | None, heads: int, kv: BlockMajorKv, attention: Attention) -> None:
        self.rules = list(dict.fromkeys(layer.rule for layer in layers))
        self._layers = layers
        self._norm = norm  # None: the next stage begins with its own
        self._heads = heads
        self._kv = kv
        self._attention = attention

    def __call__(self, hidden: torch.Tensor, tokens: Tokens, before_layer: BeforeLayer | None) -> torch.Tensor:
        count, head_dim = hidden.shape[0], self._kv.head_dim
        y = None  # what the last block has added, not yet in `hidden`
        for number, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(number)
            x = _normed(y, hidden, layer.norm_attention)
            qkv = layer.qkv(x).view(count, -1, head_dim)
            kv = self._kv.layers[number]
            q = ops.rotate_append(qkv, self._heads, tokens.positions, tokens.blocks, layer.rotation, kv)
            mixed = self._attention.run(number, q, layer.rule)
            added = _summand(layer.output, mixed.reshape(count, -1))
            x = ops.add_rms_norm(added, hidden, layer.norm_mlp.weight, layer.norm_mlp.eps)
            y = _summand(layer.down, ops.silu_mul(layer.gate_up(x)))
        if before_layer is not None:
            before_layer(len(self._layers))
        assert y is not None
        if self._norm is None:
            return hidden.add_(y if y.dim() == 2 else y.sum(0))
        return _normed(y, hidden, self._norm)


def _normed(y: torch.Tensor | None, hidden: torch.Tensor, norm: GpuRmsNorm) -> torch.Tensor:
    if y is None:
        return ops.rms_norm(hidden, norm.weight, norm.eps)
    return ops.add_rms_norm(y, hidden, norm.weight, norm.eps)


def _summand(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What `add_rms_norm` adds: the product, in parts where that is faster."""
    if isinstance(linear, GpuLinear) and linear.gives_parts(x):
        return linear.parts(x)
    return linear(x)


def build_stack(stage: StageModel, kv: BlockMajorKv, attention: Attention) -> Stack:
    """From a filled stage. Sums over shards are part of its linears (`RowParallel`)."""
    fused = _fused(stage, kv, attention)
    return fused or TransformersStack(stage, kv, attention)


def _fused(stage: StageModel, kv: BlockMajorKv, attention: Attention) -> FusedStack | None:
    config = stage.base.config
    rotary: Any = getattr(stage.base, "rotary_emb", None)
    if config.model_type not in FAMILIES or rotary is None or config.hidden_act != "silu":
        return None
    if getattr(rotary, "rope_type", None) not in _FIXED_ROTATIONS or 2 * rotary.inv_freq.shape[0] != kv.head_dim:
        return None
    if kv.head_dim & (kv.head_dim - 1):
        return None  # the kernels take powers of two
    device = kv.layers[0].keys.device
    frequencies = rotary.inv_freq.to(device=device, dtype=torch.float32)
    layers, heads = [], 0
    for module in getattr(stage.base, stage.names.layers):
        self_attn, mlp = module.self_attn, module.mlp
        if not isinstance(self_attn.q_proj, ProjectionPart) or not isinstance(mlp.gate_proj, ProjectionPart):
            return None
        shared: Any = self_attn.q_proj.shared
        heads = shared.sizes[0] // kv.head_dim
        gate: Any = mlp.gate_proj
        q_norm, k_norm = getattr(self_attn, "q_norm", None), getattr(self_attn, "k_norm", None)
        norms = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        window = config.sliding_window if config.model_type == "mistral" else getattr(self_attn, "sliding_window", None)
        layers.append(
            _Layer(
                norm_attention=module.input_layernorm,
                qkv=shared.linear,
                rotation=ops.Rotation(frequencies, float(rotary.attention_scaling), *norms),
                rule=AttentionRule(float(self_attn.scaling), window),
                output=self_attn.o_proj,
                norm_mlp=module.post_attention_layernorm,
                gate_up=gate.shared.linear,
                down=mlp.down_proj,
            )
        )
    norm = getattr(stage.base, stage.names.norm) if stage.is_last else None
    return FusedStack(layers, norm, heads, kv, attention)
