"""How many threads a step uses: measured with the shard's own largest matmul, or told by MODELYARD_TORCH_THREADS.

More threads than one often lose on a machine that others use too, so they must be clearly faster to be chosen.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

THREADS_VARIABLE = "MODELYARD_TORCH_THREADS"
RANKS_HERE_VARIABLE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_GAIN = 1.15
_RUNS = 9
_SECONDS_A_CANDIDATE = 0.05


class ComputeThreads:
    """Of the rank's compute thread, on which `use` is called before each step; torch keeps the number per thread."""

    def __init__(self, sample: Callable[[], object]) -> None:
        """`sample` is a matmul of the size that steps are made of; it runs some times at the first step."""
        self._sample = sample
        self._count = 0

    def use(self) -> None:
        if self._count == 0:
            self._count = choose(self._sample)
        torch.set_num_threads(self._count)

    def set(self, count: int) -> None:
        self._count = count


def limit() -> int:
    """The cores of this machine, shared with the other ranks that `mpiexec` started on it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get(RANKS_HERE_VARIABLE, "1")))


def choose(sample: Callable[[], object]) -> int:
    told = os.environ.get(THREADS_VARIABLE)
    if told:
        return max(1, int(told))
    best, best_s = 1, 0.0
    most = limit()
    candidates = [1]
    while candidates[-1] * 2 <= most:
        candidates.append(candidates[-1] * 2)
    if len(candidates) == 1:
        return 1
    for count in candidates:
        torch.set_num_threads(count)
        taken_s = _median_s(sample)
        if best_s == 0.0 or taken_s * _GAIN < best_s:
            best, best_s = count, taken_s
    return best


def _median_s(sample: Callable[[], object]) -> float:
    """Of some runs after a first one; the median, because a lucky moment says nothing about the next hour."""
    sample()
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _SECONDS_A_CANDIDATE:
        started = time.perf_counter()
        sample()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
