"""How long bytes take to where they are needed, by path. Rates are per rank; ranks of a group load side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Path = Literal["peer", "wake", "load"]

# Bytes a second. cuda: measured on an H200 (PCIe Gen5, NVLink 18): peer GPU memory, pinned host memory; a local NVMe disk read
# through the page cache. cpu: copies inside one machine, and reads of a converted checkpoint.
_RATES: dict[str, dict[Path, float]] = {
    "cuda": {"peer": 390e9, "wake": 55.3e9, "load": 3e9},
    "cpu": {"peer": 5e9, "wake": 5e9, "load": 0.5e9},
}
# Beyond the bytes: mapping pages, opening communicators, the canary.
_FIXED_S: dict[Path, float] = {"peer": 0.05, "wake": 0.05, "load": 5.0}


def transfer_s(bytes_per_rank: Iterable[int], kind: str, path: Path) -> float:
    """Seconds until the slowest rank has its bytes."""
    return _FIXED_S[path] + max(bytes_per_rank, default=0) / _RATES[kind][path]
