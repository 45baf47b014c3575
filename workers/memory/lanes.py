"""The physical paths into and out of a GPU, as lanes of a `CopyEngine`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.memory.copy_engine import Arrival, Chunk, Lane, Link
from workers.memory.cuda_arena import CudaArena, CudaRegion
from workers.memory.cuda_driver import CudaDriver, CudaEvent


class StreamLane:
    """Copies in order on a stream of its own on one GPU."""

    def __init__(self, name: str, link: Link, driver: CudaDriver) -> None:
        self.name = name
        self.link: Link = link
        self._driver = driver
        self._stream: torch.cuda.ExternalStream | None = None

    def copy(self, chunk: Chunk) -> Arrival:
        if self._stream is None:
            self._driver.make_current()
            self._stream = self._driver.stream()
        self._driver.copy(chunk.destination, chunk.source, chunk.size_bytes, self._stream)
        return self._driver.event(self._stream)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            self._driver.close_stream(self._stream)


class ForwardLane:
    """Pinned host memory to a GPU through another one: up that GPU's host link into a staging page, on over NVLink.

    Two staging pages on two streams, so that one page comes up while the other goes on.
    """

    link: Link = "host_in"

    def __init__(self, name: str, through: CudaDriver, staging: CudaRegion) -> None:
        self.name = name
        self._driver = through
        self._staging = staging
        self._streams: list[torch.cuda.ExternalStream] = []
        self._turn = 0
        self._last: CudaEvent | None = None
        staging.commit(2 * staging.page_bytes)

    def copy(self, chunk: Chunk) -> Arrival:
        if not self._streams:
            self._driver.make_current()
            self._streams = [self._driver.stream(), self._driver.stream()]
        stream = self._streams[self._turn]
        page = self._staging.address + self._turn * self._staging.page_bytes
        self._turn = 1 - self._turn
        self._driver.copy(page, chunk.source, chunk.size_bytes, stream)
        self._driver.copy(chunk.destination, page, chunk.size_bytes, stream)
        if self._last is not None:
            self._last.wait(stream)
        self._last = self._driver.event(stream)
        return self._last

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
            self._driver.close_stream(stream)
        self._staging.close()


def lanes_of(arena: CudaArena, through: Sequence[CudaArena] = ()) -> list[Lane]:
    """Every path of one GPU: its own host link each way, NVLink to its peers, and the host links of `through`.

    The arenas are of one process and name each other's GPUs as peers.
    """
    driver = _real(arena)
    name = f"gpu{arena.device}"
    lanes: list[Lane] = [StreamLane(f"{name}-in", "host_in", driver), StreamLane(f"{name}-out", "host_out", driver)]
    if driver.peers:
        lanes.append(StreamLane(f"{name}-peer", "peer", driver))
    for other in through:
        staging = other.reserve(f"staging-for-{name}", 2 * other.pages.page_bytes)
        lanes.append(ForwardLane(f"{name}-through-gpu{other.device}", _real(other), staging))
    return lanes


def _real(arena: CudaArena) -> CudaDriver:
    if not isinstance(arena.driver, CudaDriver):
        raise TypeError(f"arena of device {arena.device} is not on a GPU")
    return arena.driver
