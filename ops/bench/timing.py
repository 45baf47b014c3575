"""Times and their spread, as the benchmarks report them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Figures = dict[str, Any]


def timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def spread(values: list[float]) -> Figures:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
