"""What only a real GPU shows: graphs, streams and the driver's own figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from gpu_machines import Machine

from workers.memory.cuda_arena import CudaArena
from workers.memory.standby import HostCopy, Standby

pytestmark = pytest.mark.gpu
WAIT_S = 30.0
WIDTH = 1024
LAYERS = 8
LAYER_BYTES = WIDTH * WIDTH * 2


def layered(machine: Machine) -> tuple[Standby, list[torch.Tensor]]:
    """A resident stack of bf16 matrices, one to a page. Small whole numbers, so that no order of additions changes a sum."""
    region = machine.arena.reserve("stack", LAYERS * LAYER_BYTES)
    region.commit(LAYERS * LAYER_BYTES)
    weights = [region.tensor(torch.bfloat16, (WIDTH, WIDTH), layer * LAYER_BYTES) for layer in range(LAYERS)]
    for weight in weights:
        weight.random_(-1, 2)
    ends = [(layer + 1) * LAYER_BYTES for layer in range(LAYERS)]
    return Standby(region, LAYERS * LAYER_BYTES, ends, machine.engine), weights


def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).remainder(8)


def captured(weights: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    def forward() -> torch.Tensor:
        y = x
        for weight in weights:
            y = apply(y, weight)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = forward()
    return graph, y


def test_a_graph_captured_before_park_replays_right_after_wake() -> None:
    machine = Machine(16, real=True)
    standby, weights = layered(machine)
    x = torch.randint(0, 8, (4, WIDTH), device="cuda").to(torch.bfloat16)
    graph, y = captured(weights, x)
    graph.replay()
    torch.cuda.synchronize()
    before = y.clone()
    assert before.unique().numel() == 8
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    for _ in range(3):
        standby.park()
        other = machine.arena.reserve("other", 16 * machine.page_bytes)
        other.commit(16 * machine.page_bytes)
        other.tensor(torch.uint8, (other.reserved_bytes,)).fill_(255)
        torch.cuda.synchronize()
        other.close()
        wake = standby.wake()
        wake.wait_mark(LAYERS - 1, torch.cuda.current_stream(), WAIT_S)
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, before)
        wake.wait(WAIT_S)
    del weights
    standby.close(WAIT_S)
    machine.close()


def test_graphs_are_captured_while_another_model_wakes() -> None:
    """The copy engine's threads call the driver all the time, which only a thread-local capture allows."""
    machine = Machine(16, real=True)
    standby, weights = layered(machine)
    copy = HostCopy(machine.pinned, standby.size_bytes)
    standby.save(copy).wait(WAIT_S)
    other = torch.randint(-1, 2, (WIDTH, WIDTH), device="cuda").to(torch.bfloat16)
    x = torch.randint(0, 8, (4, WIDTH), device="cuda").to(torch.bfloat16)
    stop = threading.Event()
    cycles: list[int] = []

    def churn() -> None:
        while not stop.is_set() or not cycles:
            standby.park()
            standby.wake().wait(WAIT_S)
            cycles.append(1)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        graphs = [captured([other] * LAYERS, x) for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    for graph, y in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, graphs[0][1])
    del weights
    standby.close(WAIT_S)
    machine.close()


def test_layers_run_as_they_arrive() -> None:
    """The compute stream waits for each layer alone, and its result is that of the resident model."""
    machine = Machine(16, real=True)
    standby, weights = layered(machine)
    x = torch.randint(0, 8, (4, WIDTH), device="cuda").to(torch.bfloat16)
    before = x
    for layer in range(LAYERS):
        before = apply(before, weights[layer])
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    torch.cuda.synchronize()
    for _ in range(20):
        standby.park()
        wake = standby.wake()
        y = x
        for layer in range(LAYERS):
            wake.wait_mark(layer, torch.cuda.current_stream(), WAIT_S)
            y = apply(y, weights[layer])
        assert torch.equal(y, before)
        torch.cuda.synchronize()
        wake.wait(WAIT_S)
    del weights
    standby.close(WAIT_S)
    machine.close()


def test_fifty_cycles_leave_the_gpu_as_it_was() -> None:
    """Park, wake, load and unload fifty times: the driver's own figure returns to where it was."""
    machine = Machine(16, real=True)
    standby, weights = layered(machine)
    del weights
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)

    def cycle() -> None:
        standby.park()
        other = machine.arena.reserve("other", 12 * machine.page_bytes)
        other.commit(12 * machine.page_bytes)
        other.tensor(torch.uint8, (16,)).fill_(1)
        torch.cuda.synchronize()
        other.close()
        machine.arena.trim()
        standby.wake().wait(WAIT_S)

    cycle()
    before = machine.arena.report()
    for _ in range(50):
        cycle()
    after = machine.arena.report()
    assert after.free_bytes >= before.free_bytes - machine.page_bytes, (before, after)
    assert after.unexplained_bytes <= before.unexplained_bytes + machine.page_bytes
    standby.close(WAIT_S)
    released = machine.arena.trim()
    assert released.counted_bytes == released.measured_bytes
    machine.close()


def test_memory_moves_beside_a_running_kernel() -> None:
    """Rule 7: mapping and unmapping one model's memory does not wait for another model's work."""
    machine = Machine(16, real=True)
    region = machine.arena.reserve("kv", 16 * machine.page_bytes)
    region.commit(16 * machine.page_bytes)
    region.commit(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(int(2e9))  # About a second
    region.commit(16 * machine.page_bytes)
    region.commit(0)
    moved_s = time.perf_counter() - start
    torch.cuda.synchronize()
    kernel_s = time.perf_counter() - start
    assert kernel_s > 0.5
    assert moved_s < kernel_s / 4, f"mapping took {moved_s:.3f} s beside a kernel of {kernel_s:.3f} s"
    machine.close()


def test_a_fresh_thread_may_commit_and_compute() -> None:
    """The rank's load thread has no context of its own at first."""
    machine = Machine(8, real=True)
    results: list[float] = []

    def work() -> None:
        region = machine.arena.reserve("from-a-thread", machine.page_bytes)
        region.commit(machine.page_bytes)
        results.append(region.tensor(torch.float32, (1024,)).fill_(2).sum().item())
        region.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [2048.0]
    machine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("through_peer", [False, True], ids=["peer copy", "two links"])
def test_peers(through_peer: bool) -> None:
    """Wake from a peer GPU's memory, and over the host links of both."""
    from workers.memory.copy_engine import CopyEngine
    from workers.memory.lanes import lanes_of
    from workers.memory.pinned import PinnedPool
    from workers.memory.standby import PeerCopy

    page = 2 * 2**20
    arenas = [CudaArena(device, 16 * page, page_bytes=page, peers=(1 - device,)) for device in range(2)]
    driver = arenas[0].driver
    pin: tuple[Callable[..., None], ...] = (driver.pin, driver.unpin, driver.make_current)  # type: ignore[attr-defined]
    pinned = PinnedPool(64 * page, page, *pin, slab_bytes=16 * page)
    engine = CopyEngine(lanes_of(arenas[0], through=[arenas[1]] if through_peer else []))
    size = 11 * page + 100
    region = arenas[0].reserve("a", size)
    region.commit(size)
    view = region.tensor(torch.uint8, (size,))
    view.random_()
    before = view.cpu()
    standby = Standby(region, size, [size], engine)
    standby.save(HostCopy(pinned, size) if through_peer else PeerCopy(arenas[1], "a", size)).wait(WAIT_S)
    for _ in range(3):
        standby.park()
        standby.wake().wait(WAIT_S)
        assert torch.equal(view.cpu(), before)
    del view
    standby.close(WAIT_S)
    engine.close()
    for arena in arenas:
        arena.close()
    pinned.close()
