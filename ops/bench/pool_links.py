"""Wakes of a 7B model's weights over two GPUs' links and from a peer GPU's memory, beside what plain copies reach."""

from __future__ import annotations

import time

import torch

from ops.bench.engine_gpu import bandwidth_gb_s
from ops.bench.timing import Figures, spread, timed_ms
from workers.memory.copy_engine import CopyEngine
from workers.memory.cuda_arena import PAGE_BYTES, CudaArena
from workers.memory.cuda_driver import CudaDriver
from workers.memory.lanes import lanes_of
from workers.memory.pinned import PinnedPool
from workers.memory.standby import HostCopy, PeerCopy, Standby

GB, GIB = 10**9, 2**30
WAIT_S = 60.0


def measure_links(size_bytes: int, repeat: int) -> Figures:
    """Two GPUs. `size_bytes` of weights on GPU 0, whose copies are in pinned host memory and then in GPU 1."""
    arenas = [CudaArena(0, size_bytes + 2 * GIB, peers=(1,)), CudaArena(1, size_bytes + 2 * GIB, peers=(0,))]
    driver = arenas[0].driver
    assert isinstance(driver, CudaDriver)
    pinned = PinnedPool(size_bytes + GIB, PAGE_BYTES, driver.pin, driver.unpin, driver.make_current)
    pin_s = timed_ms(lambda: pinned.warm(size_bytes)) / 1e3
    engine = CopyEngine(lanes_of(arenas[0], through=[arenas[1]]))
    region = arenas[0].reserve("weights", size_bytes)
    region.commit(size_bytes)
    words = region.tensor(torch.int64, (size_bytes // 8,))
    words.random_()
    ends = [size_bytes * (layer + 1) // 32 for layer in range(32)]
    standby = Standby(region, size_bytes, ends, engine)
    sums = _sums(words)
    figures: Figures = {
        "device_copy_gb_s_read_plus_write": round(bandwidth_gb_s(), 1),
        "bytes": size_bytes,
        "pin_s": round(pin_s, 2),
        "two_links_gb_s": _plain_links(pinned, repeat),
    }

    def wakes(words: torch.Tensor, sums: torch.Tensor) -> Figures:
        times, parks, right = [], [], True
        for _ in range(repeat + 1):
            torch.cuda.synchronize(0)
            parks.append(timed_ms(standby.park))
            times.append(timed_ms(lambda: standby.wake().wait(WAIT_S)))
            right = right and _sums(words).equal(sums)
        return {"wake_ms": spread(times[1:]), "park_ms": spread(parks[1:]), "weights_right": right}

    host = HostCopy(pinned, size_bytes)
    figures["save_ms"] = round(timed_ms(lambda: standby.save(host).wait(WAIT_S)), 1)
    figures["over_two_links"] = wakes(words, sums)
    reached = size_bytes / figures["over_two_links"]["wake_ms"]["median"] / 1e6
    figures["over_two_links"]["gb_s"] = round(reached, 1)
    figures["over_two_links"]["share_of_two_links"] = round(reached / figures["two_links_gb_s"]["median"], 4)
    peer = PeerCopy(arenas[1], "peer-copy", size_bytes)
    figures["save_to_peer_ms"] = round(timed_ms(lambda: standby.save(peer).wait(WAIT_S)), 1)
    figures["from_peer"] = wakes(words, sums)
    figures["from_peer"]["gb_s"] = round(size_bytes / figures["from_peer"]["wake_ms"]["median"] / 1e6, 1)
    del words, sums
    standby.close(WAIT_S)
    engine.close()
    for arena in arenas:
        arena.close()
    pinned.close()
    torch.cuda.empty_cache()
    return figures


def _sums(words: torch.Tensor) -> torch.Tensor:
    return words.view(32, -1).sum(1)


def _plain_links(pinned: PinnedPool, repeat: int) -> Figures:
    """Plain copies of 2 GiB from pinned memory to each GPU at once, GB/s together."""
    pages = pinned.take(2 * GIB // pinned.page_bytes)
    targets = [torch.empty(pinned.page_bytes, dtype=torch.uint8, device=f"cuda:{device}") for device in (0, 1)]
    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    rates = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        for device in (0, 1):
            with torch.cuda.stream(streams[device]):
                for page in pages:
                    _copy(targets[device], page.address, pinned.page_bytes, streams[device])
        for stream in streams:
            stream.synchronize()
        rates.append(2 * len(pages) * pinned.page_bytes / (time.perf_counter() - began) / GB)
    pinned.give(pages)
    return spread(rates[1:])


def _copy(target: torch.Tensor, source: int, size_bytes: int, stream: torch.cuda.Stream) -> None:
    from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

    kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    (status,) = runtime.cudaMemcpyAsync(target.data_ptr(), source, size_bytes, kind, stream.cuda_stream)
    if int(status):
        raise RuntimeError(f"cudaMemcpyAsync: {status.name}")
