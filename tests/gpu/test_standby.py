"""Park and wake: nothing is lost, nothing is left behind, and whoever shares a link shares it evenly."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_machines import Machine, MakeMachine, on_each_machine
from simulated_gpu import MemoryLane

from workers.memory.copy_engine import Arrival, Chunk, CopyEngine, Lane, Link, Transfer
from workers.memory.cuda_driver import CudaError
from workers.memory.standby import HostCopy, PeerCopy, Standby

WAIT_S = 30.0


def model(machine: Machine, name: str, pages: int) -> Standby:
    """A resident model of `pages` pages less some bytes, with a layer to each page."""
    size = pages * machine.page_bytes - 100
    region = machine.arena.reserve(name, size)
    region.commit(size)
    region.tensor(torch.uint8, (size,)).copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    ends = [min((page + 1) * machine.page_bytes, size) for page in range(pages)]
    return Standby(region, size, ends, machine.engine)


def content(standby: Standby) -> torch.Tensor:
    return standby.region.tensor(torch.uint8, (standby.size_bytes,)).cpu().clone()


@on_each_machine
def test_a_woken_model_has_the_bytes_it_was_parked_with(make: MakeMachine) -> None:
    machine = make(8)
    standby = model(machine, "a", 7)
    before = content(standby)
    address = standby.region.address
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    for _ in range(3):
        standby.park()
        assert standby.state == "parked"
        assert machine.arena.committed_bytes == 0
        other = machine.arena.reserve("other", 8 * machine.page_bytes)
        other.commit(8 * machine.page_bytes)  # The same pages serve someone else in between
        other.tensor(torch.uint8, (other.reserved_bytes,)).fill_(255)
        other.close()
        standby.wake().wait(WAIT_S)
        assert standby.state == "resident"
        assert standby.region.address == address
        assert torch.equal(content(standby), before)
        machine.arena.check()
    standby.close(WAIT_S)
    machine.close()


@on_each_machine
def test_a_cold_load_wakes_from_what_was_read_from_disk(make: MakeMachine) -> None:
    machine = make(8)
    size = 5 * machine.page_bytes + 12
    copy = HostCopy(machine.pinned, size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for start in range(0, size, 70001):
        copy.write(start, data[start : start + 70001])
    with pytest.raises(ValueError, match="do not fit"):
        copy.write(size - 1, data[:2])
    standby = Standby(machine.arena.reserve("a", size), size, [size], machine.engine)
    with pytest.raises(ValueError, match="not complete"):
        standby.adopt(copy)
    copy.declare_complete()
    standby.adopt(copy)
    standby.wake().wait(WAIT_S)
    assert torch.equal(content(standby), data)
    standby.close(WAIT_S)
    machine.close()


@on_each_machine
def test_parking_needs_a_complete_copy(make: MakeMachine) -> None:
    """Rule 5: refused, with the next step, rather than losing the only bytes."""
    machine = make(8)
    standby = model(machine, "a", 3)
    with pytest.raises(ValueError, match="save it first"):
        standby.park()
    copy = HostCopy(machine.pinned, standby.size_bytes)
    standby.save(copy).wait(WAIT_S)
    standby.park()
    with pytest.raises(ValueError, match="it must be resident"):
        standby.park()
    with pytest.raises(ValueError, match="needs this copy"):
        standby.drop(copy, WAIT_S)
    standby.wake().wait(WAIT_S)
    standby.drop(copy, WAIT_S)
    assert machine.pinned.free_bytes == machine.pinned.pinned_bytes
    with pytest.raises(ValueError, match="save it first"):
        standby.park()
    standby.close(WAIT_S)
    machine.close()


@on_each_machine
def test_a_wake_without_room_changes_nothing(make: MakeMachine) -> None:
    """Rule 3."""
    machine = make(8)
    standby = model(machine, "a", 6)
    before = content(standby)
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    standby.park()
    other = machine.arena.reserve("other", 3 * machine.page_bytes)
    other.commit(3 * machine.page_bytes)
    with pytest.raises(MemoryError, match="park a model or shrink a cache"):
        standby.wake()
    assert standby.state == "parked"
    machine.arena.check()
    other.close()
    standby.wake().wait(WAIT_S)
    assert torch.equal(content(standby), before)
    standby.close(WAIT_S)
    machine.close()


@on_each_machine
@pytest.mark.parametrize("call", ["map", "grant"])
def test_a_wake_that_fails_midway_is_undone_and_can_be_repeated(make: MakeMachine, call: str) -> None:
    """Rule 3: the pages go back, the error reaches whoever waits, the copy is still good."""
    machine = make(8)
    standby = model(machine, "a", 7)
    before = content(standby)
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    standby.park()
    for nth in (1, 2):
        machine.driver.arm(call, nth)
        wake = standby.wake()
        with pytest.raises(RuntimeError, match="failed and was undone") as failure:
            wake.wait(WAIT_S)
        assert isinstance(failure.value.__cause__, CudaError)
        with pytest.raises(RuntimeError, match="failed and was undone"):
            wake.wait_mark(6, torch.cuda.current_stream() if torch.cuda.is_available() else None, WAIT_S)  # type: ignore[arg-type]
        assert standby.state == "parked"
        assert machine.arena.committed_bytes == 0
    machine.driver.arm("", 0)
    standby.wake().wait(WAIT_S)
    assert torch.equal(content(standby), before)
    standby.close(WAIT_S)
    machine.close()


def test_no_room_for_a_host_copy_is_an_error_with_the_figures() -> None:
    machine = Machine(8, real=False)
    with pytest.raises(MemoryError, match="pinned host memory asked"):
        HostCopy(machine.pinned, 65 * machine.page_bytes)
    assert machine.pinned.pinned_bytes == 0
    machine.close()


# ------------------------------------------------------------------ the copy engine, with lanes held back by the test


class GatedLane(MemoryLane):
    """A lane whose copies arrive only when the test lets them."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, link)
        self.gate = threading.Semaphore(0)
        self.sent = threading.Semaphore(0)
        self.names: list[str] = []

    def copy(self, chunk: Chunk) -> Arrival:
        self.names.append(threading.current_thread().name)
        self.sent.release()
        self.gate.acquire()
        self.copied.append(chunk)
        return super().copy(chunk)


def chunks(buffer: torch.Tensor, tag: int, count: int) -> list[Chunk]:
    """Chunks that carry their transfer's tag as their size."""
    return [Chunk(buffer.data_ptr(), buffer.data_ptr() + 512, tag) for _ in range(count)]


def nothing() -> None:
    pass


def test_transfers_take_turns() -> None:
    """A wake that starts while another one runs gets every second chunk from then on."""
    buffer = torch.zeros(1024, dtype=torch.uint8)
    lane = GatedLane("in", "host_in")
    engine = CopyEngine([lane])
    first = Transfer("first", "host_in", iter(chunks(buffer, 1, 6)), 6, [6], nothing)
    second = Transfer("second", "host_in", iter(chunks(buffer, 2, 3)), 3, [3], nothing)
    engine.submit(first)
    lane.sent.acquire()
    engine.submit(second)
    for _ in range(9):
        lane.gate.release()
    first.wait(WAIT_S)
    second.wait(WAIT_S)
    engine.close()
    sizes = [chunk.size_bytes for chunk in lane.copied[::2]]
    assert sizes == [1, 1, 2, 1, 2, 1, 2, 1, 1]


def test_two_lanes_of_a_link_carry_one_transfer() -> None:
    """Split wake: each lane takes the next chunk when it is free, and a layer is there when all of it is."""
    buffer = torch.zeros(1024, dtype=torch.uint8)
    slow, fast = GatedLane("slow", "host_in"), GatedLane("fast", "host_in")
    engine = CopyEngine([slow, fast])
    transfer = Transfer("split", "host_in", iter(chunks(buffer, 1, 5)), 5, [1, 5], nothing)
    engine.submit(transfer)
    slow.sent.acquire()
    fast.sent.acquire()
    for _ in range(4):
        fast.gate.release()
    for _ in range(3):
        fast.sent.acquire()
    assert not transfer.over, "the slow lane's chunk is still missing"
    slow.gate.release()
    transfer.wait(WAIT_S)
    engine.close()
    assert (len(slow.copied), len(fast.copied)) == (2, 8)  # Each chunk is noted twice: when let through and when copied


def test_a_failing_lane_fails_the_transfer_and_not_the_next_one() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)

    class Broken(MemoryLane):
        def copy(self, chunk: Chunk) -> Arrival:
            if chunk.size_bytes == 3:
                raise CudaError("link down")
            return super().copy(chunk)

    undone = threading.Event()
    lanes: list[Lane] = [Broken("one", "host_in"), Broken("two", "host_in")]
    engine = CopyEngine(lanes)
    bad = Transfer(
        "bad", "host_in", iter([*chunks(buffer, 1, 2), *chunks(buffer, 3, 1), *chunks(buffer, 1, 5)]), 8, [8], undone.set
    )
    good = Transfer("good", "host_in", iter(chunks(buffer, 2, 8)), 8, [8], nothing)
    engine.submit(bad)
    engine.submit(good)
    with pytest.raises(RuntimeError, match="link down"):
        bad.wait(WAIT_S)
    assert undone.is_set()
    good.wait(WAIT_S)
    with pytest.raises(ValueError, match="no lane for peer"):
        engine.submit(Transfer("peer", "peer", iter(()), 0, [], nothing))
    engine.close()


def test_a_peer_copy_is_preferred_and_lives_in_the_peers_pool() -> None:
    """Simulated: on real hardware this takes two GPUs (test_peers)."""
    lanes: list[Lane] = [MemoryLane("in", "host_in"), MemoryLane("out", "host_out"), peer := MemoryLane("peer", "peer")]
    machine = Machine(8, real=False, lanes=lanes)
    other = Machine(8, real=False)
    standby = model(machine, "a", 5)
    before = content(standby)
    standby.save(HostCopy(machine.pinned, standby.size_bytes)).wait(WAIT_S)
    copy = PeerCopy(other.arena, "a-standby", standby.size_bytes)
    standby.save(copy).wait(WAIT_S)
    assert other.arena.committed_bytes == 5 * other.page_bytes
    standby.park()
    peer.copied.clear()
    standby.wake().wait(WAIT_S)
    assert len(peer.copied) == 5
    assert torch.equal(content(standby), before)
    standby.drop(copy, WAIT_S)
    assert other.arena.committed_bytes == 0
    standby.close(WAIT_S)
    machine.close()
    other.close()


@on_each_machine
def test_memory_is_pinned_ahead_beside_whoever_takes_it(make: MakeMachine) -> None:
    machine = make(8)
    pinned, slab = machine.pinned, 16 * machine.page_bytes
    threads = [threading.Thread(target=pinned.pin_ahead, args=(3 * slab + 1,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    pages = [pinned.take(3) for _ in range(4)]
    for thread in threads:
        thread.join(WAIT_S)
    assert 3 * slab <= pinned.pinned_bytes <= pinned.capacity_bytes == 4 * slab
    assert pinned.free_bytes == pinned.pinned_bytes - 12 * machine.page_bytes
    for taken in pages:
        pinned.give(taken)
    machine.close()
    pinned.pin_ahead(4 * slab)
    assert pinned.pinned_bytes == 0, "a closed pool pins nothing more"
