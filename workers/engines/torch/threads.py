"""How many threads one step uses. Chosen by a short measurement, or by MODELYARD_TORCH_THREADS."""

from __future__ import annotations

import functools
import os
import threading

import torch

THREADS_VARIABLE = "MODELYARD_TORCH_THREADS"
RANKS_HERE_VARIABLE = "OMPI_COMM_WORLD_LOCAL_SIZE"


class ComputeThreads:
    """torch keeps the number per calling thread: `use` sets it for the rank's compute thread at its first step."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._set = threading.local()

    def use(self) -> None:
        if getattr(self._set, "count", 0) != self.count:
            torch.set_num_threads(self.count)
            self._set.count = self.count


@functools.cache
def choose() -> int:
    """The cores of this machine, shared with the other ranks that `mpiexec` started on it."""
    told = os.environ.get(THREADS_VARIABLE)
    if told:
        return max(1, int(told))
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get(RANKS_HERE_VARIABLE, "1")))
