"""Attention and feed-forward blocks with fewer, larger operations than transformers' modules, for the families whose
modules are known to compute exactly this; built from those modules once they are filled. All others run as they are.

A decode step of a small model is bound by the number of operations: these take 9 and 4 where the originals take 60 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.torch.attention import AttentionRule, LayerAttention, attend
from workers.engines.torch.linear import ProjectionPart
from workers.engines.torch.stage import StageModel

# Rotate-half rotary attention, optionally with norms of q and k, and down(act(gate(x)) * up(x)).
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


class RotaryAttention(nn.Module):
    def __init__(self, attention: Any, window: int | None) -> None:
        super().__init__()
        shared = attention.q_proj.shared
        self.qkv = shared.linear
        self.o_proj = attention.o_proj
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.head_dim = int(attention.head_dim)
        self.heads = shared.sizes[0] // self.head_dim
        self.kv_heads = shared.sizes[1] // self.head_dim
        self.layer_idx = attention.layer_idx
        self._rule = AttentionRule(float(attention.scaling), window, getattr(attention, "attn_logit_softcapping", None))
        self.paged: LayerAttention

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> tuple[torch.Tensor, None]:
        heads, kv_heads = self.heads, self.kv_heads
        paged = self.paged
        batch, layer = paged.batch, paged.layer
        qkv = self.qkv(hidden_states[0]).view(-1, heads + 2 * kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
            qkv[:, heads : heads + kv_heads] = self.k_norm(qkv[:, heads : heads + kv_heads])
        rotated = qkv.narrow(1, 0, heads + kv_heads)
        cos, sin = batch.rotary.get(id(position_embeddings[0])) or _rotary(batch.rotary, *position_embeddings)
        other_half = torch.roll(rotated, self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(other_half, sin)
        keys_and_values = qkv.narrow(1, heads, 2 * kv_heads)
        batch.kv.write_both(layer, batch.write_blocks, batch.write_offsets, keys_and_values)
        q, k, v = qkv.narrow(1, 0, heads), qkv.narrow(1, heads, kv_heads), qkv.narrow(1, heads + kv_heads, kv_heads)
        mixed = attend(batch, layer, q, k, v, self._rule)
        return self.o_proj(mixed.reshape(1, -1, heads * self.head_dim)), None


def _rotary(
    known: dict[int, tuple[torch.Tensor, torch.Tensor]], cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, tokens, head_dim] to [tokens, 1, head_dim], once a step; the sign of rotate-half goes into the sine."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    known[id(cos)] = found = (cos[0].unsqueeze(1), signed.unsqueeze(1))
    return found


class GatedMlp(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        shared = mlp.gate_proj.shared
        self.gate_up = shared.linear
        self.down_proj = mlp.down_proj
        self._size = shared.sizes[0]
        self._activation: Callable[[torch.Tensor], torch.Tensor] = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        gate = self._activation(both.narrow(-1, 0, self._size))
        return self.down_proj(gate.mul_(both.narrow(-1, self._size, self._size)))


def fuse_blocks(stage: StageModel) -> None:
    """Replace what is known in every layer of a filled stage."""
    config = stage.base.config
    if config.model_type not in FAMILIES:
        return
    for layer in getattr(stage.base, stage.names.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if isinstance(attention.q_proj, ProjectionPart):
            # Mistral keeps one window for all layers in its configuration, the others one a layer in the module.
            window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
            layer.self_attn = RotaryAttention(attention, window)
        if isinstance(mlp.gate_proj, ProjectionPart):
            layer.mlp = GatedMlp(mlp)
