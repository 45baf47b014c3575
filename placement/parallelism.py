"""Which tensor x pipeline degrees a model may run at, the least hardware first."""

from __future__ import annotations

from collections.abc import Iterator

from placement.split import pipeline_parallel_problem, tensor_parallel_problem
from placement.types import ModelRequest, Reason


def degrees(request: ModelRequest, device: str, largest_domain: int, devices: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) pairs in the order to try them: by product; at one product the wider tensor split first on CUDA
    (a token takes less time), the deeper pipeline first on CPU (a tensor split waits for messages in every layer).

    `largest_domain` bounds the tensor degree (ranks that share a node and NVLink), `devices` the product.
    """
    tensor = [request.tensor_parallel] if request.tensor_parallel else range(1, largest_domain + 1)
    pipeline = [request.pipeline_parallel] if request.pipeline_parallel else range(1, devices + 1)
    pairs = [
        (tp, pp)
        for tp in tensor
        if tp <= largest_domain and tensor_parallel_problem(request.shape, tp) is None
        for pp in pipeline
        if tp * pp <= devices and pipeline_parallel_problem(request.shape, pp) is None
    ]
    yield from sorted(pairs, key=lambda pair: (pair[0] * pair[1], -pair[0] if device == "cuda" else pair[0]))


def degree_problems(request: ModelRequest) -> tuple[Reason, ...]:
    """Why the degrees that a model asks for cannot work anywhere."""
    reasons = []
    if request.tensor_parallel and (problem := tensor_parallel_problem(request.shape, request.tensor_parallel)):
        advice = _advice(request)
        reasons.append(Reason("divisibility", f"tensor_parallel {request.tensor_parallel}: {problem}; use {advice}"))
    if request.pipeline_parallel and (problem := pipeline_parallel_problem(request.shape, request.pipeline_parallel)):
        reasons.append(Reason("divisibility", f"pipeline_parallel {request.pipeline_parallel}: {problem}"))
    return tuple(reasons)


def _advice(request: ModelRequest) -> str:
    possible = [degree for degree in range(1, 65) if tensor_parallel_problem(request.shape, degree) is None]
    return f"{', '.join(map(str, possible[:6]))} or auto"
