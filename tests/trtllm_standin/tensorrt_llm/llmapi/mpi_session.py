"""MpiPoolSession: ranks spawned by mpi4py, as in the library."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from tensorrt_llm_standin_gpu import LATE_FREE_S


class MpiPoolSession:
    def __init__(self, n_workers: int, wait_shutdown: bool = False, env_overrides: dict[str, str] | None = None) -> None:
        from mpi4py.futures import MPIPoolExecutor

        self.n_workers = n_workers
        self._wait = wait_shutdown
        self._pool = MPIPoolExecutor(max_workers=n_workers, env=env_overrides or {}, main=False)

    def submit(self, task: Any, *arguments: Any) -> list[Future]:
        return [self._pool.submit(task, *arguments, rank) for rank in range(self.n_workers)]

    def shutdown(self) -> None:
        self._pool.shutdown(wait=self._wait)
        if self._wait:
            time.sleep(LATE_FREE_S)
