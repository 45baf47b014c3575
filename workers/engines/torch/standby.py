"""Weights of a CPU shard that stand by: a copy in anonymous host memory, outside the pool's arena.

A CPU pool's arena is host memory too. What a park gives back is the pool's: the ledger's bytes, which other models may then use.
The copy is counted as `standby`, by the bytes that it holds. It lives from the park to the end of the wake, so a model that
serves is in memory once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from workers.engines.torch.memory import TensorRegion

_CHUNK_BYTES = 16 * 2**20  # between two of them, threads that compute get a turn


class HostCopy:
    """Of everything that a region has committed."""

    def __init__(self, region: TensorRegion) -> None:
        """Copies now. MemoryError when the host has no room."""
        self._source = region
        self.size_bytes = region.committed_bytes
        try:
            self._bytes = torch.empty(self.size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"a standby copy of {self.size_bytes} bytes: {error}") from error
        _copy(region.region.tensor(torch.uint8, (self.size_bytes,)), self._bytes)

    def copy_back(self) -> None:
        """The region is committed again, at the addresses it had."""
        _copy(self._bytes, self._source.region.tensor(torch.uint8, (self.size_bytes,)))


class CopyBack(threading.Thread):
    """A wake under way. `awake` is called by who waits for it, once all of it is back."""

    def __init__(self, copy: HostCopy, name: str, awake: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._copy = copy
        self._awake = awake
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._copy.copy_back()
        except BaseException as error:  # noqa: BLE001 - raised again for who waits
            self._error = error

    def wait(self, timeout_s: float) -> None:
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"{self.name}: the weights are not back after {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
        self._awake()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    for start in range(0, source.numel(), _CHUNK_BYTES):
        target[start : start + _CHUNK_BYTES].copy_(source[start : start + _CHUNK_BYTES])
