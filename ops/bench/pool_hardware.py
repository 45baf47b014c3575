"""What the machine gives the pool: the link, pinning, and the driver's mapping calls by page size."""

from __future__ import annotations

import torch

from ops.bench.timing import Figures, spread, timed_ms
from workers.memory.cuda_arena import PAGE_BYTES
from workers.memory.cuda_driver import CudaDriver
from workers.memory.pinned import PinnedPool

GB, GIB, MIB = 10**9, 2**30, 2**20


def measure_link(repeat: int) -> Figures:
    """What plain copies of 2 GiB between one pinned buffer of torch's and the GPU reach, GB/s."""
    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True).random_()
    gpu = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")

    def rate(destination: torch.Tensor, source: torch.Tensor) -> Figures:
        rates = []
        for _ in range(repeat + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            destination.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(host.numel() / start.elapsed_time(end) / 1e6)
        return spread(rates[1:])

    other = torch.empty_like(gpu)
    figures = {"host_to_gpu_gb_s": rate(gpu, host), "gpu_to_host_gb_s": rate(host, gpu)}
    figures["gpu_copy_gb_s_read_plus_write"] = {key: 2 * value for key, value in rate(other, gpu).items()}
    del gpu, other
    torch.cuda.empty_cache()
    return figures


def measure_pinning(driver: CudaDriver, size_bytes: int) -> tuple[PinnedPool, Figures]:
    """Pinning for the first time, on one thread and on the pool's, and again in memory the machine has touched before.

    `thread_s` are the seconds its threads spent in the driver's registration alone, together.
    """
    registering: list[float] = []

    def pin(address: int, count: int) -> None:
        registering.append(timed_ms(lambda: driver.pin(address, count)) / 1e3)

    def warmed(size: int, **threads: int) -> tuple[PinnedPool, Figures]:
        registering.clear()
        pool = PinnedPool(size, PAGE_BYTES, pin, driver.unpin, driver.make_current, **threads)
        seconds = timed_ms(lambda: pool.warm(size)) / 1e3
        gib = size / GIB
        return pool, {"s_per_gib": round(seconds / gib, 3), "registering_thread_s_per_gib": round(sum(registering) / gib, 3)}

    figures: Figures = {"bytes": size_bytes}
    for name, size, threads in (
        ("first_one_thread", 2 * GIB, {"threads": 1}),
        ("first", size_bytes, {}),
        ("again_one_thread", 4 * GIB, {"threads": 1}),
    ):
        pool, figures[name] = warmed(size, **threads)
        pool.close()
    pool, figures["again"] = warmed(size_bytes)
    return pool, figures


def measure_page_sizes(driver: CudaDriver, repeat: int) -> list[Figures]:
    """Each driver call over 14 GB, by page size, ms."""
    rows = []
    for page_mib in (2, 16, 32, 64, 128, 256):
        cycles = [map_cycle(driver, page_mib * MIB, 14 * GB) for _ in range(2 if page_mib < 16 else repeat)]
        rows.append({"page_mib": page_mib, **{call: spread([cycle[call] for cycle in cycles]) for call in cycles[0]}})
    return rows


def map_cycle(driver: CudaDriver, page: int, size_bytes: int) -> dict[str, float]:
    count = -(-size_bytes // page)
    base = driver.reserve(count * page, page)
    addresses = range(base, base + count * page, page)
    handles: list[int] = []
    times = {
        "create": timed_ms(lambda: handles.extend(driver.create(page) for _ in addresses)),
        "map": timed_ms(lambda: [driver.map(each, page, handle) for each, handle in zip(addresses, handles, strict=True)]),
        "grant": timed_ms(lambda: driver.grant(base, count * page)),
        "unmap": timed_ms(lambda: driver.unmap(base, count * page)),
        "release": timed_ms(lambda: [driver.release(handle) for handle in handles]),
    }
    driver.free_range(base, count * page)
    return times
