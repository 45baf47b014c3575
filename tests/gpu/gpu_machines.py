"""What the memory tests run on: a simulated GPU everywhere, and the real one where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_gpu import PAGE_BYTES, FailingDriver, MemfdDriver, MemoryLane

from workers.memory.copy_engine import CopyEngine, Lane
from workers.memory.cuda_arena import CudaArena
from workers.memory.cuda_driver import CudaDriver
from workers.memory.lanes import StreamLane
from workers.memory.pinned import PinnedPool


class Machine:
    """One GPU with a pool of `pages` pages, a copy engine and pinned memory, on real or simulated hardware."""

    def __init__(self, pages: int, *, real: bool, lanes: list[Lane] | None = None, spare_pages: int = 64) -> None:
        self.page_bytes = 2 * 2**20 if real else PAGE_BYTES
        driver: Any = CudaDriver(0) if real else MemfdDriver((pages + spare_pages) * PAGE_BYTES)
        self.driver = FailingDriver(driver)
        page_driver: Any = self.driver
        self.arena = CudaArena(0, pages * self.page_bytes, page_bytes=self.page_bytes, driver=page_driver)
        pin = (driver.pin, driver.unpin, driver.make_current) if real else (_nothing, _nothing, _nothing)
        self.pinned = PinnedPool(64 * self.page_bytes, self.page_bytes, *pin, slab_bytes=16 * self.page_bytes)
        if lanes is None:
            make = (lambda name, link: StreamLane(name, link, driver)) if real else MemoryLane
            lanes = [make("in", "host_in"), make("out", "host_out")]
        self.engine = CopyEngine(lanes)

    def close(self) -> None:
        self.engine.close()
        self.arena.close()
        self.pinned.close()


def _nothing(*_: int) -> None:
    pass


MakeMachine = Callable[..., Machine]


def _real(pages: int, **options: Any) -> Machine:
    return Machine(pages, real=True, **options)


def _simulated(pages: int, **options: Any) -> Machine:
    return Machine(pages, real=False, **options)


on_each_machine = pytest.mark.parametrize(
    "make", [pytest.param(_simulated, id="simulated"), pytest.param(_real, id="gpu", marks=pytest.mark.gpu)]
)
