"""What models see of the pool: wake, park, remap, first token, and what one does to its neighbours."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ops.bench.reference_7b import LAYERS, VOCABULARY, Reference7B
from ops.bench.timing import Figures, spread, timed_ms
from workers.memory.copy_engine import CopyEngine
from workers.memory.cuda_arena import PAGE_BYTES, CudaArena
from workers.memory.pinned import PinnedPool
from workers.memory.standby import HostCopy, Standby

GB, GIB = 10**9, 2**30
WAIT_S = 60.0
CONTEXT = 640
PREFILL_TOKENS = 512
REMAP_BYTES = 8 * GIB
BF16_ERROR = 1e-2  # What another order of the same bf16 additions may make


class Model:
    """A reference model with a decode graph and a host copy."""

    def __init__(self, arena: CudaArena, pinned: PinnedPool, engine: CopyEngine, name: str) -> None:
        self.free_before_bytes = arena.driver.memory_info()[0] + arena.report().kept_bytes
        self.weights = Reference7B(arena.reserve, name, CONTEXT)
        self.standby = Standby(self.weights.region, self.weights.size_bytes, self.weights.layer_ends, engine)
        self.graph, self.logits = self.weights.capture()
        self.graph.replay()
        torch.cuda.synchronize()
        self.expected = self.logits.float()
        self.expected_sums = self.page_sums()
        start = time.perf_counter()
        self.standby.save(HostCopy(pinned, self.weights.size_bytes)).wait(WAIT_S)
        self.save_s = time.perf_counter() - start

    def replay_error(self) -> float:
        """Replay the graph; relative error of its logits against those before the first park. NaN where nothing was written.

        Not always zero, parked or not: torch takes cuDNN's attention for a single query, whose reduction over the context
        varies in order, in the pool's memory as in plain memory (see `measure_replay_noise`).
        """
        self.logits.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return ((self.logits.float() - self.expected).norm() / self.expected.norm()).item()

    def page_sums(self) -> torch.Tensor:
        """One exact sum for each whole page of the weights."""
        words = PAGE_BYTES // 8
        return self.weights.region.tensor(torch.int64, (self.weights.size_bytes // PAGE_BYTES, words)).sum(1)

    def is_right(self) -> bool:
        """Every weight is what it was, and a replay gives the logits it gave before the first park."""
        error = self.replay_error()
        return error <= BF16_ERROR and torch.equal(self.page_sums(), self.expected_sums)

    def park_ms(self) -> float:
        torch.cuda.synchronize()
        return timed_ms(self.standby.park)


def measure_wakes(model: Model, repeat: int, link_gb_s: float) -> Figures:
    """Wake from the request on, until layer 0 may run and until all of it may; park with the copy kept."""
    stream = torch.cuda.Stream()
    parks, first, whole, right = [], [], [], True
    for _ in range(repeat + 1):
        parks.append(model.park_ms())
        start = time.perf_counter()
        wake = model.standby.wake()
        wake.wait_mark(0, stream, WAIT_S)
        stream.synchronize()
        first.append((time.perf_counter() - start) * 1e3)
        wake.wait(WAIT_S)
        whole.append((time.perf_counter() - start) * 1e3)
        right = model.is_right() and right
    size = model.weights.size_bytes
    share = size / (statistics.median(whole[1:]) / 1e3) / GB / link_gb_s
    return {
        "bytes": size,
        "park_ms": spread(parks[1:]),
        "first_layer_ready_ms": spread(first[1:]),
        "wake_ms": spread(whole[1:]),
        "share_of_link": round(share, 4),
        "weights_and_replays_right": right,
    }


def measure_replay_noise(model: Model, repeat: int) -> Figures:
    """How often a replay differs in any bit without any parking, and by how much: what to compare replays after a wake with."""
    errors = [model.replay_error() for _ in range(repeat)]
    return {"replays": repeat, "not_bit_equal": sum(error > 0 for error in errors), "largest_relative_error": max(errors)}


def measure_left_behind(model: Model, arena: CudaArena) -> Figures:
    """Bytes a parked model still takes, by the driver's figure, with its graph kept and its KV given back.

    The first model of a process loads the kernel libraries too, which is paid once.
    """
    kv_bytes = model.weights.kv_region.committed_bytes
    kept_kv = model.weights.kv.clone().cpu()
    model.park_ms()
    model.weights.kv_region.commit(0)
    trim_ms = timed_ms(arena.trim)
    torch.cuda.empty_cache()
    left = model.free_before_bytes - arena.driver.memory_info()[0]
    model.weights.kv_region.commit(kv_bytes)
    model.weights.kv.copy_(kept_kv)
    model.standby.wake().wait(WAIT_S)
    return {"left_bytes": left, "release_to_driver_ms": round(trim_ms, 2)}


def measure_remap(arena: CudaArena, repeat: int) -> Figures:
    """KV memory from model A to model B: A gives back, B maps."""
    a, b = arena.reserve("a-elastic-kv", REMAP_BYTES), arena.reserve("b-elastic-kv", REMAP_BYTES)
    a.commit(REMAP_BYTES)
    give, get = [], []
    for _ in range(repeat + 1):
        give.append(timed_ms(partial(a.commit, 0)))
        get.append(timed_ms(partial(b.commit, REMAP_BYTES)))
        b.tensor(torch.uint8, (REMAP_BYTES,))[:: PAGE_BYTES // 2].fill_(1)
        torch.cuda.synchronize()
        a, b = b, a
    a.close()
    b.close()
    total = [one + other for one, other in zip(give[1:], get[1:], strict=True)]
    return {"bytes": REMAP_BYTES, "give_ms": spread(give[1:]), "get_ms": spread(get[1:]), "total_ms": spread(total)}


def measure_first_token(model: Model, repeat: int) -> Figures:
    """A parked model's first token of a 512-token prompt: prefill after the wake, and layer by layer during it."""
    tokens = torch.randint(0, VOCABULARY, (PREFILL_TOKENS,), device="cuda")
    stream = torch.cuda.current_stream()

    def resident() -> torch.Tensor:
        logits = model.weights.prefill(tokens, lambda _: None)
        torch.cuda.synchronize()
        return logits

    def after() -> torch.Tensor:
        model.standby.wake().wait(WAIT_S)
        return resident()

    def during() -> torch.Tensor:
        wake = model.standby.wake()
        logits = model.weights.prefill(tokens, lambda layer: wake.wait_mark(layer, stream, WAIT_S))
        torch.cuda.synchronize()
        wake.wait(WAIT_S)
        return logits

    kept_kv = model.weights.kv.clone()
    with torch.inference_mode():
        expected = resident()
        resident_ms = [timed_ms(resident) for _ in range(repeat)]
        times: dict[str, list[float]] = {"after": [], "during": []}
        right = True
        for name, way in (("after", after), ("during", during)):
            for _ in range(repeat):
                model.park_ms()
                start = time.perf_counter()
                logits = way()
                times[name].append((time.perf_counter() - start) * 1e3)
                error = (logits.float() - expected.float()).norm() / expected.float().norm()
                right = bool(error <= BF16_ERROR) and right
        model.weights.kv.copy_(kept_kv)
    return {
        "prompt_tokens": PREFILL_TOKENS,
        "prefill_resident_ms": spread(resident_ms),
        "wake_then_prefill_ms": spread(times["after"]),
        "prefill_during_wake_ms": spread(times["during"]),
        "logits_right": right,
        "layers": LAYERS,
    }


def decode_steps(model: Model, stop: Callable[[], bool], at_least: int) -> list[float]:
    """Step times of one stream after the other, ms, as a server sees them: replay, then wait."""
    steps = []
    while not stop() or len(steps) < at_least:
        steps.append(timed_ms(lambda: (model.graph.replay(), torch.cuda.current_stream().synchronize())))
    return steps


def measure_neighbours(serving: Model, waking: Model, repeat: int) -> Figures:
    """One model decodes while another is parked and woken (rule 7)."""
    alone = decode_steps(serving, lambda: True, 50)
    beside: list[float] = []
    wakes: list[float] = []
    beside_park: list[float] = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        parking = threading.Thread(target=waking.standby.park)
        parking.start()
        beside_park += decode_steps(serving, lambda thread=parking: not thread.is_alive(), 4)
        parking.join()
        start = time.perf_counter()
        wake = waking.standby.wake()
        beside += decode_steps(serving, lambda transfer=wake: transfer.over, 1)
        wakes.append((time.perf_counter() - start) * 1e3)
    return {
        "step_alone_ms": spread(alone),
        "step_beside_wake_ms": spread(beside),
        "step_beside_park_ms": spread(beside_park),
        "wake_beside_decode_ms": spread(wakes),
        "steps_beside_wake": len(beside),
    }


def measure_two_wakes(first: Model, second: Model) -> Figures:
    """Two wakes started together: each should take twice as long, and end together."""
    first.park_ms()
    second.park_ms()
    start = time.perf_counter()
    transfers = [model.standby.wake() for model in (first, second)]
    ends: dict[int, float] = {}
    while len(ends) < 2:
        for number, transfer in enumerate(transfers):
            if number not in ends and transfer.over:
                ends[number] = (time.perf_counter() - start) * 1e3
        time.sleep(0.0005)
    right = first.is_right() and second.is_right()
    return {"ends_ms": [round(ends[0], 1), round(ends[1], 1)], "weights_and_replays_right": right}


def measure_busy_interpreter(model: Model) -> Figures:
    """A wake while another thread of the process runs Python without a pause."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    model.park_ms()
    thread.start()
    try:
        wake_ms = timed_ms(lambda: model.standby.wake().wait(WAIT_S))
    finally:
        stop.set()
        thread.join()
    return {"wake_ms": round(wake_ms, 1)}


class PlainRegion:
    """A region's words over torch's own allocator: all of it is there from the start."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.reserved_bytes = self.committed_bytes = size_bytes
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    def commit(self, size_bytes: int) -> None:
        pass

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset_bytes : offset_bytes + size].view(dtype).view(shape)

    def close(self) -> None:
        pass


def measure_pooling_tax(pooled: Model) -> Figures:
    """A decode step of the same model in the pool's memory and in plain memory, taken in turns."""
    plain = Reference7B(PlainRegion, "plain", CONTEXT)
    graph, _ = plain.capture()
    times: dict[str, list[float]] = {"pool": [], "plain": []}
    for _ in range(5):
        for name, replay in (("pool", pooled.graph.replay), ("plain", graph.replay)):
            for _ in range(20):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end))
    ratio = statistics.median(times["plain"]) / statistics.median(times["pool"])
    return {"pool_ms": spread(times["pool"]), "plain_ms": spread(times["plain"]), "pool_speed_over_plain": round(ratio, 4)}
