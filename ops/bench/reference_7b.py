"""The reference model of the GPU benchmarks: the shape of Llama-2-7B with random bf16 weights in one region of the pool.

Written out rather than taken from transformers, because the benchmark is about memory: it shows that kernels and graphs read
weights and KV from the pool. No rotary embedding; all else is there, so that time and bytes are those of the shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from workers.memory.arena import Region

VOCABULARY, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 32000, 4096, 32, 32, 11008
HEAD_DIM = HIDDEN // HEADS
ALIGNMENT_BYTES = 256
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Layer:
    norm_attention: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


LAYER_SHAPES: tuple[tuple[int, ...], ...] = (
    (HIDDEN,),
    (3 * HIDDEN, HIDDEN),
    (HIDDEN, HIDDEN),
    (HIDDEN,),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)


RegionT = TypeVar("RegionT", bound=Region)


class Reference7B(Generic[RegionT]):
    """Weights in the order of use: embeddings, layers, final norm and head. `layer_ends[i]`: bytes that layer i needs."""

    def __init__(self, reserve: Callable[[str, int], RegionT], name: str, context: int) -> None:
        shapes = [(VOCABULARY, HIDDEN), *LAYER_SHAPES * LAYERS, (HIDDEN,), (VOCABULARY, HIDDEN)]
        offsets = [0]
        for shape in shapes:
            size = torch.Size(shape).numel() * BF16.itemsize
            offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        self.size_bytes = offsets[-1]
        per_layer = len(LAYER_SHAPES)
        self.layer_ends = [*(offsets[1 + per_layer * (layer + 1)] for layer in range(LAYERS)), self.size_bytes]
        self.region = reserve(f"{name}-weights", self.size_bytes)
        self.region.commit(self.size_bytes)
        tensors = [self.region.tensor(BF16, shape, offset) for shape, offset in zip(shapes, offsets, strict=False)]
        for tensor in tensors:
            tensor.fill_(1) if tensor.dim() == 1 else tensor.normal_(std=0.02)
        self.embedding, self.norm, self.head = tensors[0], tensors[-2], tensors[-1]
        self.layers = [Layer(*tensors[start : start + per_layer]) for start in range(1, 1 + per_layer * LAYERS, per_layer)]
        kv_shape = (LAYERS, 2, HEADS, context, HEAD_DIM)
        kv_bytes = torch.Size(kv_shape).numel() * BF16.itemsize
        self.kv_region = reserve(f"{name}-kv", kv_bytes)
        self.kv_region.commit(kv_bytes)
        self.kv = self.kv_region.tensor(BF16, kv_shape).normal_()
        self.token = torch.full((1,), 17, device=self.kv.device)

    def prefill(self, tokens: torch.Tensor, before_layer: Callable[[int], None]) -> torch.Tensor:
        """Logits after the last of [n] tokens. `before_layer(i)` runs before layer i is used; LAYERS stands for the head."""
        before_layer(0)
        return self._forward(tokens, 0, before_layer)

    def decode(self) -> torch.Tensor:
        """Logits after one token at the end of a full context."""
        return self._forward(self.token, self.kv.shape[3] - 1, lambda _: None)

    def capture(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of `decode`, and where it leaves the logits."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.decode()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.decode()
        return graph, logits

    def _forward(self, tokens: torch.Tensor, start: int, before_layer: Callable[[int], None]) -> torch.Tensor:
        count = tokens.numel()
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            before_layer(number)
            qkv = linear(rms_norm(x, (HIDDEN,), layer.norm_attention), layer.qkv)
            query, key, value = qkv.view(count, 3, HEADS, HEAD_DIM).permute(1, 2, 0, 3)
            keys, values = self.kv[number, 0], self.kv[number, 1]
            keys[:, start : start + count] = key
            values[:, start : start + count] = value
            end = start + count
            mixed = scaled_dot_product_attention(
                query[None], keys[None, :, :end], values[None, :, :end], is_causal=start == 0 and count > 1
            )
            x = x + linear(mixed[0].transpose(0, 1).reshape(count, HIDDEN), layer.output)
            gate, up = linear(rms_norm(x, (HIDDEN,), layer.norm_mlp), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        before_layer(LAYERS)
        return linear(rms_norm(x[-1:], (HIDDEN,), self.norm), self.head)
