"""Where a shard's tensors live: regions of the pool's arena, one per kind, each within its budget."""

from __future__ import annotations

import torch

from workers.memory.arena import Arena, Region

_ALIGNMENT = 256  # what GPU kernels like best; CPUs need 64


class TensorRegion:
    """Tensors allocated one after the other and freed together. Every byte is accounted before it is touched (rule 3)."""

    def __init__(self, arena: Arena, name: str, reserve_bytes: int, budget_bytes: int | None) -> None:
        self._region: Region = arena.reserve(name, reserve_bytes)
        self._budget_bytes = budget_bytes
        self._used_bytes = 0

    @property
    def region(self) -> Region:
        return self._region

    @property
    def committed_bytes(self) -> int:
        return self._region.committed_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """MemoryError when the budget or the arena does not suffice; nothing is allocated then."""
        count = 1
        for dimension in shape:
            count *= dimension
        start = -(-self._used_bytes // _ALIGNMENT) * _ALIGNMENT
        end = start + count * dtype.itemsize
        if self._budget_bytes is not None and end > self._budget_bytes:
            raise MemoryError(f"{self._region.name}: needs at least {end} bytes, its budget is {self._budget_bytes}")
        if end > self._region.committed_bytes:
            self._region.commit(end)
        self._used_bytes = end
        return self._region.tensor(dtype, shape, start)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, in this region."""
        return self.empty(tensor.dtype, tuple(tensor.shape)).copy_(tensor)

    def close(self) -> None:
        self._region.close()
