"""Triton kernels for what a step does between library kernels. Called through `ops`, which knows when they may be.

A step of few tokens is bound by reading weights once and by the gaps between kernels. So kernels are launched as programmatic
dependents (PDL): each is set up while the one before it ends. It waits (`gdc_wait`) before it touches what others wrote, and
always waits, so that whatever ran two kernels earlier has ended too. Only then does it let the next one be set up
(`gdc_launch_dependents`): earlier, that one's programs take places on multiprocessors before it is known where the work ends
first, which costs more than the gap (measured: 4.40 instead of 3.84 ms a step).
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    size,
    eps,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program. ADD: residual += x, and that is what is normalised. x may be the sum of PARTS."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    for part in tl.static_range(1, PARTS):
        above = part * tl.num_programs(0).to(tl.int64) * size
        x += tl.load(x_ptr + above + row * size + column, mask=inside, other=0.0)
    if PARTS > 1:
        x = x.to(kind).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(kind)
        tl.store(residual_ptr + row * size + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    normed = (x * scale).to(kind).to(tl.float32) * weight
    tl.store(out_ptr + row * size + column, normed.to(kind), mask=inside)


@triton.jit
def silu_mul_kernel(both_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """both [rows, 2 * size] → silu of its first half times its second."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(both_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(both_ptr + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * size + column, (wide * tl.sigmoid(wide) * up).to(gate.dtype), mask=inside)


@triton.jit
def rotate_append_kernel(
    qkv_ptr,
    position_ptr,
    block_ptr,
    frequency_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cache_ptr,
    scaling,
    eps,
    block_stride,
    value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and GROUP heads of one kind a program. qkv [tokens, HEADS + 2 * KV_HEADS, 2 * HALF].

    Rotates q in place; rotates k and copies k and v to the token's place in the cache of this layer, [.., KV_HEADS, BLOCK_TOKENS,
    2 * HALF] from `cache_ptr` on in every block. A token of block -1 has no place.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    first_head = tl.program_id(1) * GROUP
    half = tl.arange(0, HALF)
    frequency = tl.load(frequency_ptr + half)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * (2 * HALF) + half[None, :]
    low = tl.load(source)
    high = tl.load(source + HALF)
    kind = low.dtype
    position = tl.load(position_ptr + token)
    if first_head < HEADS + KV_HEADS:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if NORM:
            weight_ptr = q_weight_ptr if first_head < HEADS else k_weight_ptr
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            a = (a * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + half).to(tl.float32)[None, :]
            b = (b * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
        angle = position.to(tl.float32) * frequency
        cosine = (tl.cos(angle) * scaling)[None, :]
        sine = (tl.sin(angle) * scaling)[None, :]
        low = (a * cosine - b * sine).to(kind)
        high = (b * cosine + a * sine).to(kind)
    if first_head < HEADS:
        tl.store(source, low)
        tl.store(source + HALF, high)
    else:
        block = tl.load(block_ptr + token).to(tl.int64)
        if block >= 0:
            is_value = first_head >= HEADS + KV_HEADS
            kv_head = head - HEADS - (KV_HEADS if is_value else 0)
            place = block * block_stride + (value_offset if is_value else 0)
            row = kv_head * BLOCK_TOKENS + position % BLOCK_TOKENS
            target = cache_ptr + place + row[:, None] * (2 * HALF) + half[None, :]
            tl.store(target, low)
            tl.store(target + HALF, high)


@triton.jit
def vector_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    n,
    k,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: out [n] = W x, BLOCK_N outputs a program. SCALED: W in 8 bits with a scale a row."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    rows_inside = (row < n)[:, None]
    at = weight_ptr + row.to(tl.int64)[:, None] * k + column[None, :]
    # The first weights do not depend on the kernel before.
    tile = tl.load(at, mask=rows_inside & (column < k)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, k, BLOCK_K):
        current = tile
        following = start + BLOCK_K + column
        tile = tl.load(at + start + BLOCK_K, mask=rows_inside & (following < k)[None, :], other=0.0)
        x = tl.load(x_ptr + start + column, mask=start + column < k, other=0.0).to(tl.float32)
        total += current.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if SCALED:
        y *= tl.load(scale_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < n)


@triton.jit
def narrow_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows: out [m, n] = x [m, k] W^T, BLOCK_M rows and BLOCK_N outputs a program. SCALED: W in 8 bits with a scale a row.

    PARTS above 1: out [PARTS, m, n] in fp32, each the sum over a share of k.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    rows_inside = (row < n)[:, None]
    tokens_inside = (token < m)[None, :]
    at = weight_ptr + row.to(tl.int64)[:, None] * k + column[None, :]
    x_at = x_ptr + token[None, :] * k + column[:, None]
    share = tl.cdiv(k, PARTS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, tl.minimum(first + share, k), BLOCK_K):
        columns_inside = start + column < k
        weight = tl.load(at + start, mask=rows_inside & columns_inside[None, :], other=0.0)
        x = tl.load(x_at + start, mask=tokens_inside & columns_inside[:, None], other=0.0)
        total = tl.dot(weight.to(x.dtype), x, total)
    if SCALED:
        total *= tl.load(scale_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + tl.program_id(2).to(tl.int64) * m * n + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=rows_inside & tokens_inside)


@triton.jit
def append_kernel(
    k_ptr,
    v_ptr,
    position_ptr,
    block_ptr,
    cache_ptr,
    block_stride,
    value_offset,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """k and v [tokens, KV_HEADS, SIZE] to the tokens' places in one layer's cache; see `rotate_append_kernel`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    element = tl.arange(0, SIZE)
    block = tl.load(block_ptr + token).to(tl.int64)
    if block >= 0:
        offset = tl.load(position_ptr + token) % BLOCK_TOKENS
        source = (token * KV_HEADS + head)[:, None] * SIZE + element[None, :]
        target = cache_ptr + block * block_stride + (head * BLOCK_TOKENS + offset)[:, None] * SIZE + element[None, :]
        tl.store(target, tl.load(k_ptr + source))
        tl.store(target + value_offset, tl.load(v_ptr + source))


@triton.jit
def _gumbel(token, low, high):
    """The noise of `noise.gumbel`, bit by bit up to the logarithms."""
    x = token.to(tl.uint32) * 0x9E3779B1 + low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16) ^ high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    v = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log1p(-v): for small v its series, because 1 - v has lost what distinguishes them.
    tail = tl.where(v < 1e-3, v * (1.0 + v * (0.5 + v * 0.33333334)), -tl.log(1.0 - v))
    return -tl.log(tail)


@triton.jit
def draw_kernel(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    low_ptr,
    high_ptr,
    out_ptr,
    vocabulary,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token for a row of logits: temperature, then top-k, top-p and min-p, then the largest with noise of what is left.

    All three filters keep what is above a threshold, which bisection finds: no sort. Below the largest logit by more than SPAN
    (after temperature) lies nothing that counts.
    """
    number = tl.program_id(0)
    row = tl.load(row_ptr + number).to(tl.int64) * vocabulary
    inverse = 1.0 / tl.load(temperature_ptr + number)
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0)
    threshold = -SPAN
    top_k = tl.load(top_k_ptr + number)
    if top_k > 0:
        low = -SPAN
        high = SPAN * 1e-6
        for _ in range(STEPS):
            middle = 0.5 * (low + high)
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocabulary, BLOCK):
                inside = start + column < vocabulary
                x = tl.load(logits_ptr + row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                count += ((x - top) * inverse >= middle).to(tl.int32)
            enough = tl.sum(count, 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        threshold = low
    top_p = tl.load(top_p_ptr + number)
    if top_p < 1.0:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            x = tl.load(logits_ptr + row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            u = (x - top) * inverse
            mass += tl.where(u >= threshold, tl.exp(u), 0.0)
        wanted = tl.sum(mass, 0) * top_p
        low = threshold
        high = SPAN * 1e-6
        for _ in range(STEPS):
            middle = 0.5 * (low + high)
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                inside = start + column < vocabulary
                x = tl.load(logits_ptr + row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                u = (x - top) * inverse
                mass += tl.where(u >= middle, tl.exp(u), 0.0)
            enough = tl.sum(mass, 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        threshold = low
    min_p = tl.load(min_p_ptr + number)
    threshold = tl.maximum(threshold, tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-30)), -SPAN))
    key_low = tl.load(low_ptr + number).to(tl.uint32)
    key_high = tl.load(high_ptr + number).to(tl.uint32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + row + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        u = (x - top) * inverse
        score = tl.where(inside & (u >= threshold), u + _gumbel(start + column, key_low, key_high), float("-inf"))
        token = tl.where(score > best, start + column, token)
        best = tl.maximum(best, score)
    found = tl.min(tl.where(best == tl.max(best, 0), token, vocabulary - 1), 0)
    tl.store(out_ptr + number, found.to(tl.int64))


@triton.jit
def known_ids_kernel(id_ptr, place_ptr, newest_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """ids, and where one is below 0 the newest token at its place."""
    row = tl.arange(0, BLOCK)
    inside = row < count
    known = tl.load(id_ptr + row, mask=inside, other=0)
    newest = tl.load(newest_ptr + tl.load(place_ptr + row, mask=inside, other=0), mask=inside, other=0)
    tl.store(out_ptr + row, tl.where(known < 0, newest, known), mask=inside)


@triton.jit
def largest_kernel(logits_ptr, place_ptr, newest_ptr, out_ptr, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The token with the largest logit of a row (the first of equal ones), which becomes the newest at the row's place."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + row.to(tl.int64) * vocabulary + start + column, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        token = tl.where(x > best, start + column, token)
        best = tl.maximum(best, x)
    found = tl.min(tl.where(best == tl.max(best, 0), token, vocabulary - 1), 0)
    tl.store(out_ptr + row, found.to(tl.int64))
    tl.store(newest_ptr + tl.load(place_ptr + row), found)
