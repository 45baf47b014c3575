"""What would make a refused model fit: each tried through the same search that refused it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from placement.types import ModelRequest, Reason

_NARROWER = {
    "torch": {"fp32": ("bf16", "int8", "int4"), "bf16": ("int8", "int4"), "fp16": ("int8", "int4"), "int8": ("int4",)},
    "trtllm": {"fp32": ("bf16", "fp8", "int4"), "bf16": ("fp8", "int4"), "fp16": ("fp8", "int4"), "fp8": ("int4",)},
}
_LEAST_CONTEXT = 256


def remedies(request: ModelRequest, fits: Callable[[ModelRequest], bool]) -> tuple[Reason, ...]:
    """At most one of each sort: the widest precision, the longest context, free degrees, other pools."""
    return tuple(Reason("remedy", f"{remedy} would fit") for remedy in _that_fit(request, fits))


def _that_fit(request: ModelRequest, fits: Callable[[ModelRequest], bool]) -> Iterator[str]:
    wanted = request.shape.precision if request.precision == "auto" else request.precision
    for precision in _NARROWER[request.engine].get(wanted, ()):
        if fits(replace(request, precision=precision)):
            yield f"precision {precision}"
            break
    context = _longest_context(request, fits)
    if context:
        yield f"context ≤ {context}"
    elif request.kv_floor_bytes and fits(replace(request, kv_floor_bytes=0)):
        yield "a smaller kv.floor"
    if request.tensor_parallel or request.pipeline_parallel:
        free = replace(request, tensor_parallel=None, pipeline_parallel=None)
        if fits(free):
            yield "tensor_parallel auto with pipeline_parallel auto"
    if request.slo and fits(replace(request, slo=None)):
        yield "it without its slo"
    if request.pools and fits(replace(request, pools=())):
        yield "another pool (its `pools` leaves them out)"


def _longest_context(request: ModelRequest, fits: Callable[[ModelRequest], bool]) -> int:
    """In steps of 256 tokens; 0 when even that many are too long, or the context is not what is in the way."""
    shortest, longest = 1, (request.context - 1) // _LEAST_CONTEXT
    if longest < 1 or not fits(replace(request, context=_LEAST_CONTEXT)):
        return 0
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if fits(replace(request, context=middle * _LEAST_CONTEXT)):
            shortest = middle
        else:
            longest = middle - 1
    return shortest * _LEAST_CONTEXT
