"""What a decoder layer computes between its products, as one kernel each; and products of few rows with what surrounds them.

Each operation is one Triton kernel on a GPU and plain torch elsewhere: that is the reference for tests, and what runs where
Triton is missing. Activations are [rows, size], contiguous.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from workers.engines.torch.noise import gumbel_rows

if TYPE_CHECKING:
    from workers.engines.torch.cuda.kv import LayerKv

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own way of running kernels on a CPU, for tests


def _load_kernels() -> ModuleType | None:
    try:
        from workers.engines.torch.cuda import kernels
    except ImportError:
        return None
    return kernels


_kernels: Any = _load_kernels()


def fused(x: torch.Tensor) -> bool:
    """Whether operations on this tensor are one kernel each."""
    return _kernels is not None and (x.is_cuda or _INTERPRETED)


def _launch(x: torch.Tensor) -> dict[str, Any]:
    return _launch_options(x.device.index) if x.is_cuda else {"PDL": False}


@functools.cache
def _launch_options(device: int) -> dict[str, Any]:
    """Programmatic dependent launches exist from Hopper on."""
    dependent = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


# ---------------------------------------------------------------- norm and activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In the rounding of transformers' RMSNorm modules."""
    if not fused(x):
        return _plain_norm(x, weight, eps)
    out = torch.empty_like(x)
    _norm(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x; its norm. x may be in parts that are to be summed, [parts, rows, size] in fp32."""
    if not fused(x):
        residual += x if x.dim() == residual.dim() else x.sum(0).to(residual.dtype)
        return _plain_norm(residual, weight, eps)
    out = torch.empty_like(residual)
    _norm(x, residual, weight, out, eps, add=True)
    return out


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool) -> None:
    size = x.shape[-1]
    block = 1 << (size - 1).bit_length()
    parts = x.shape[0] if x.dim() > residual.dim() else 1
    warps = 4 if block <= 2048 else 8
    _kernels.rms_norm_kernel[(residual.numel() // size,)](
        x, residual, weight, out, size, eps, ADD=add, PARTS=parts, BLOCK=block, num_warps=warps, **_launch(x)
    )


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * size] → silu of the first half times the second."""
    rows, size = both.shape[0], both.shape[1] // 2
    if not fused(both):
        return F.silu(both[:, :size]) * both[:, size:]
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    block = 1024
    _kernels.silu_mul_kernel[(rows, -(-size // block))](both, out, size, BLOCK=block, num_warps=4, **_launch(both))
    return out


# ---------------------------------------------------------------- rotary positions and the KV cache


@dataclass(frozen=True)
class Rotation:
    """How a family turns q and k: inverse frequencies [head_dim / 2] in fp32, and the factor on sines and cosines."""

    frequencies: torch.Tensor
    scaling: float
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


def rotate_append(
    qkv: torch.Tensor,
    heads: int,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    rotation: Rotation,
    kv: LayerKv,
) -> torch.Tensor:
    """qkv [tokens, heads + 2 * kv_heads, head_dim], straight from the projection → rotated q, [tokens, heads, head_dim].

    k (rotated) and v go to the tokens' places in the cache: block blocks[i], offset positions[i] mod the block's tokens. A token
    of block -1 has no place. q and k are normalised first where the family does.
    """
    kv_heads = kv.heads
    if not fused(qkv):
        return _plain_rotate_append(qkv, heads, positions, blocks, rotation, kv)
    group = math.gcd(math.gcd(heads, kv_heads), 8)
    q_norm, k_norm = rotation.q_norm, rotation.k_norm
    _kernels.rotate_append_kernel[(qkv.shape[0], (heads + 2 * kv_heads) // group)](
        qkv,
        positions,
        blocks,
        rotation.frequencies,
        rotation.frequencies if q_norm is None else q_norm,
        rotation.frequencies if k_norm is None else k_norm,
        kv.keys,
        rotation.scaling,
        rotation.eps,
        kv.keys.stride(0),
        kv.value_offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=qkv.shape[-1] // 2,
        BLOCK_TOKENS=kv.block_tokens,
        GROUP=group,
        NORM=q_norm is not None,
        num_warps=1 if group * qkv.shape[-1] <= 512 else 2,
        **_launch(qkv),
    )
    return qkv[:, :heads]


def _plain_rotate_append(
    qkv: torch.Tensor, heads: int, positions: torch.Tensor, blocks: torch.Tensor, rotation: Rotation, kv: LayerKv
) -> torch.Tensor:
    q, k, v = qkv.split([heads, kv.heads, kv.heads], dim=1)
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q, k = _plain_norm(q, rotation.q_norm, rotation.eps), _plain_norm(k, rotation.k_norm, rotation.eps)
    angles = positions.float().unsqueeze(1) * rotation.frequencies
    cosine = (angles.cos() * rotation.scaling).unsqueeze(1)
    sine = (angles.sin() * rotation.scaling).unsqueeze(1)
    q, k = _turn(q, cosine, sine), _turn(k, cosine, sine)
    kv.write(positions, blocks, k, v)
    return q


def _turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(x.dtype)


def append(k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, kv: LayerKv) -> None:
    """k and v [tokens, kv_heads, head_dim] to the tokens' places in the cache, as `rotate_append`."""
    size = k.shape[-1]
    if not fused(k) or size & (size - 1):
        kv.write(positions, blocks, k, v)
        return
    k, v = k.contiguous(), v.contiguous()
    group = math.gcd(kv.heads, 8)
    sizes = {"KV_HEADS": kv.heads, "SIZE": size, "BLOCK_TOKENS": kv.block_tokens, "GROUP": group}
    grid = (k.shape[0], kv.heads // group)
    _kernels.append_kernel[grid](k, v, positions, blocks, kv.keys, kv.keys.stride(0), kv.value_offset, **sizes, num_warps=1)


# ---------------------------------------------------------------- products

VECTOR_TILE = (8, 512)  # outputs and inputs
NARROW_ROWS = 64  # of one program


@dataclass(frozen=True)
class Weight:
    """[n, k]; in 8 bits with a scale a row, or in the activations' dtype without."""

    matrix: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.matrix.shape[0]

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        if self.scales is None:
            return self.matrix.to(dtype)
        return self.matrix.to(dtype) * self.scales.to(dtype).unsqueeze(1)


def vector_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """One row, x [1, k] → [1, n]. For few outputs faster than what splits the inputs."""
    if not fused(x):
        return F.linear(x, weight.widened(x.dtype), weight.bias)
    n, k = weight.matrix.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    block_n, block_k = VECTOR_TILE
    _kernels.vector_linear_kernel[(-(-n // block_n),)](
        x,
        weight.matrix,
        x if weight.scales is None else weight.scales,
        x if weight.bias is None else weight.bias,
        out,
        n,
        k,
        SCALED=weight.scales is not None,
        BIAS=weight.bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if k > 8192 else 4,
        **_launch(x),
    )
    return out


@dataclass(frozen=True)
class Tile:
    outputs: int
    inputs: int
    stages: int  # of the pipeline that loads weights
    warps: int = 4


TILE = Tile(64, 128, 3)  # the fastest of those measured on an H200 for 7B shapes
_PROGRAMS = 256  # that many read weights at the memory's full speed


def narrow_linear(x: torch.Tensor, weight: Weight, tile: Tile = TILE) -> torch.Tensor:
    """A few rows, x [m, k] → [m, n]."""
    if not fused(x):
        return F.linear(x, weight.widened(x.dtype), weight.bias)
    out = torch.empty((x.shape[0], weight.outputs), dtype=x.dtype, device=x.device)
    return _narrow(x, weight, out, tile, 1)


def narrow_parts(x: torch.Tensor, weight: Weight, tile: Tile = TILE, parts: int = 0) -> torch.Tensor:
    """A few rows without a bias, in parts that are to be summed, [parts, m, n] in fp32: few outputs give few programs."""
    if not fused(x):
        return F.linear(x, weight.widened(x.dtype)).float().unsqueeze(0)
    parts = parts or min(max(1, _PROGRAMS * tile.outputs // weight.outputs), -(-x.shape[1] // tile.inputs))
    out = torch.empty((parts, x.shape[0], weight.outputs), dtype=torch.float32, device=x.device)
    return _narrow(x, weight, out, tile, parts)


def _narrow(x: torch.Tensor, weight: Weight, out: torch.Tensor, tile: Tile, parts: int) -> torch.Tensor:
    m, k = x.shape
    n = weight.outputs
    block_m = min(NARROW_ROWS, max(16, 1 << (m - 1).bit_length()))
    _kernels.narrow_linear_kernel[(-(-n // tile.outputs), -(-m // block_m), parts)](
        x,
        weight.matrix,
        x if weight.scales is None else weight.scales,
        x if weight.bias is None else weight.bias,
        out,
        m,
        n,
        k,
        SCALED=weight.scales is not None,
        BIAS=weight.bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        PARTS=parts,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_launch(x),
    )
    return out


# ---------------------------------------------------------------- drawing


def known_ids(ids: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """ids [n] int32, and where one is below 0 the newest token at its place."""
    if not fused(ids):
        return torch.where(ids < 0, newest.index_select(0, places), ids)
    out = torch.empty_like(ids)
    count = ids.shape[0]
    _kernels.known_ids_kernel[(1,)](ids, places, newest, out, count, BLOCK=1 << (count - 1).bit_length())
    return out


def largest(logits: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Tokens [n] int64 with the largest logit of each row, which become the newest at `places` (int32)."""
    if not fused(logits):
        tokens = logits.argmax(dim=-1)
        newest.index_copy_(0, places.long(), tokens.int())
        return tokens
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    vocabulary = logits.shape[1]
    block = min(8192, 1 << (vocabulary - 1).bit_length())
    _kernels.largest_kernel[(logits.shape[0],)](
        logits, places, newest, tokens, vocabulary, BLOCK=block, num_warps=16, **_launch(logits)
    )
    return tokens


@dataclass(frozen=True)
class Filters:
    """By row drawn, each [n]. top_k 0, top_p 1 and min_p 0 filter nothing."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def draw(
    logits: torch.Tensor, rows: torch.Tensor, filters: Filters, low: torch.Tensor, high: torch.Tensor, span: float, steps: int
) -> torch.Tensor:
    """Tokens [n] int64 drawn from logits[rows]: temperature, top-k, top-p, min-p, then the largest with noise of what is left.

    `low` and `high` [n] int64: the keys of the noise (`noise.keys`). A filter keeps ties. Logits below the largest by more than
    `span` do not count.
    """
    if not fused(logits):
        return _plain_draw(logits[rows], filters, low, high)
    out = torch.empty(rows.shape, dtype=torch.int64, device=logits.device)
    vocabulary = logits.shape[1]
    _kernels.draw_kernel[(rows.shape[0],)](
        logits,
        rows,
        filters.temperature,
        filters.top_k,
        filters.top_p,
        filters.min_p,
        low,
        high,
        out,
        vocabulary,
        SPAN=span,
        STEPS=steps,
        BLOCK=min(4096, 1 << (vocabulary - 1).bit_length()),
        num_warps=8,
    )
    return out


def _plain_draw(logits: torch.Tensor, filters: Filters, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    vocabulary = logits.shape[1]
    weights = torch.softmax(logits.float() / filters.temperature.unsqueeze(1), dim=-1)
    ordered = weights.sort(dim=-1, descending=True).values
    kth = torch.where(filters.top_k > 0, filters.top_k, vocabulary).clamp(max=vocabulary).long() - 1
    weights = weights.masked_fill(weights < ordered.gather(1, kth.unsqueeze(1)), 0.0)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, kth.unsqueeze(1)), 0.0)
    running = ordered.double().cumsum(-1)
    wanted = running[:, -1:] * filters.top_p.unsqueeze(1)
    last = torch.searchsorted(running, wanted).clamp(max=vocabulary - 1)
    limit = torch.where(filters.top_p.unsqueeze(1) < 1.0, ordered.gather(1, last), torch.zeros_like(ordered[:, :1]))
    weights = weights.masked_fill(weights < limit, 0.0)
    weights = weights.masked_fill(weights < filters.min_p.unsqueeze(1) * ordered[:, :1], 0.0)
    return (weights.log() + gumbel_rows(low, high, vocabulary)).argmax(-1)
