"""The GPU arena: capacity, all-or-nothing steps, pages that move between regions. On a simulated GPU, and the real one."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from gpu_machines import Machine, MakeMachine, on_each_machine
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.memory.cuda_arena import CudaRegion
from workers.memory.cuda_driver import CudaError

PAGES = 12

operations = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 2), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("commit_range"), st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)),
    st.tuples(st.just("decommit_range"), st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)),
    st.tuples(st.just("reopen"), st.integers(0, 2), st.just(0), st.just(0)),
    st.tuples(st.just("trim"), st.integers(0, 3), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["fail create", "fail map", "fail grant"]), st.integers(1, 4), st.just(0), st.just(0)),
)


class Expected:
    """The arena in plain sets: which pages of which region are there, and the byte written to each."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stamps = itertools.cycle(range(1, 256))
        self.regions: dict[int, CudaRegion] = {number: self.open(number) for number in range(3)}
        self.pages: dict[int, dict[int, int]] = {number: {} for number in range(3)}

    def open(self, number: int) -> CudaRegion:
        return self.machine.arena.reserve(f"region-{number}", 8 * self.machine.page_bytes)

    def view(self, number: int, page: int) -> torch.Tensor:
        size = self.machine.page_bytes
        return self.regions[number].tensor(torch.uint8, (size,), page * size)

    def keep(self, number: int, pages: set[int]) -> None:
        """The region now has exactly these pages; the new ones get a stamp."""
        held = self.pages[number]
        self.pages[number] = {page: held.get(page) or next(self.stamps) for page in pages}
        for page in pages - held.keys():
            self.view(number, page).fill_(self.pages[number][page])

    def apply(self, name: str, number: int, first: int, last: int) -> None:
        size = self.machine.page_bytes
        first, last = (first, last) if name == "commit" else sorted((first, last))
        held = set(self.pages.get(number, {}))
        if name.startswith("fail"):
            self.machine.driver.arm(name.split()[1], number)
        elif name == "trim":
            assert self.machine.arena.trim(number * size).counted_bytes >= 0
        elif name == "reopen":
            self.regions[number].close()
            self.regions[number], self.pages[number] = self.open(number), {}
        elif name == "commit":
            self.attempt(number, held | set(range(first)), held & set(range(first)) | set(range(first)), first * size)
        elif name == "commit_range":
            self.attempt(number, held | set(range(first, last)), held | set(range(first, last)), (first * size, last * size))
        else:
            self.regions[number].decommit_range(first * size, last * size)
            self.keep(number, held - set(range(first, last)))

    def attempt(self, number: int, at_most: set[int], after: set[int], argument: int | tuple[int, int]) -> None:
        region = self.regions[number]
        others = sum(len(pages) for other, pages in self.pages.items() if other != number)
        beyond = others + len(at_most) > PAGES or max(at_most, default=0) >= 8
        armed = self.machine.driver.calls_left > 0
        try:
            region.commit(argument) if isinstance(argument, int) else region.commit_range(*argument)
        except MemoryError:
            assert beyond or armed, "refused though there was room"
        except CudaError:
            assert armed
        except ValueError:
            raise AssertionError("lost a page") from None
        else:
            assert not beyond, "exceeded the capacity"
            self.keep(number, after)

    def check(self) -> None:
        arena = self.machine.arena
        arena.check()
        assert arena.committed_bytes == sum(map(len, self.pages.values())) * self.machine.page_bytes
        for number, pages in self.pages.items():
            assert self.regions[number].committed_bytes == len(pages) * self.machine.page_bytes
            for page, stamp in pages.items():
                view = self.view(number, page)
                assert bool((view[:: view.numel() // 64] == stamp).all()), "a page was lost, or shared by two regions"


@on_each_machine
def test_no_sequence_exceeds_capacity_or_leaks_a_page(make: MakeMachine) -> None:
    """Rule 3, under any order of commits, holes, closes, trims and failures of any driver call."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(operations, max_size=25))
    def run(sequence: list[tuple[str, int, int, int]]) -> None:
        machine = make(PAGES)
        try:
            expected = Expected(machine)
            for operation in sequence:
                expected.apply(*operation)
                expected.check()
        finally:
            machine.driver.arm("", 0)
            machine.close()
        assert machine.arena.report().kept_bytes == 0

    run()


@on_each_machine
@pytest.mark.parametrize("call", ["create", "map", "grant"])
def test_failure_at_each_step_leaves_nothing(make: MakeMachine, call: str) -> None:
    """Rule 3: whichever driver call fails, nothing is committed, and the same commit works afterwards."""
    machine = make(PAGES)
    region = machine.arena.reserve("weights", 8 * machine.page_bytes)
    region.commit_range(2 * machine.page_bytes, 3 * machine.page_bytes)  # A page in the middle makes two runs to map
    before = machine.arena.regions()
    for nth in range(1, 8 if call != "grant" else 3):
        machine.arena.trim()
        machine.driver.arm(call, nth)
        with pytest.raises((MemoryError, CudaError)):
            region.commit(8 * machine.page_bytes)
        assert machine.arena.regions() == before
        machine.arena.check()
    machine.driver.arm("", 0)
    region.commit(8 * machine.page_bytes)
    assert region.committed_bytes == 8 * machine.page_bytes
    machine.close()


@on_each_machine
def test_two_regions_exchange_pages_without_allocating(make: MakeMachine) -> None:
    machine = make(8)
    first, second = (machine.arena.reserve(name, 8 * machine.page_bytes) for name in ("kv-a", "kv-b"))
    first.commit(8 * machine.page_bytes)
    machine.driver.arm("create", 1)  # From here on an allocation would fail
    for _ in range(10):
        with pytest.raises(MemoryError, match="kv-b asks for"):
            second.commit(machine.page_bytes)
        first.commit(3 * machine.page_bytes)
        second.commit(5 * machine.page_bytes)
        second.tensor(torch.uint8, (5 * machine.page_bytes,)).fill_(7)
        second.commit(0)
        first.commit(8 * machine.page_bytes)
    assert machine.arena.committed_bytes == 8 * machine.page_bytes
    machine.close()


@on_each_machine
def test_the_order_of_loads_does_not_change_the_result(make: MakeMachine) -> None:
    """Rule 4: whatever the order, the same regions fit and the same capacity is left."""
    sizes = {"a": 3, "b": 5, "c": 2}
    left = set()
    for order in itertools.permutations(sizes):
        machine = make(PAGES)
        for name in order:
            machine.arena.reserve(name, sizes[name] * machine.page_bytes).commit(sizes[name] * machine.page_bytes)
        left.add((machine.arena.capacity_bytes - machine.arena.committed_bytes, tuple(sorted(machine.arena.regions().items()))))
        machine.close()
    assert len(left) == 1


@on_each_machine
def test_freed_bytes_are_measured(make: MakeMachine) -> None:
    """Rule 3: what trim gave back is read from the driver; used and committed bytes give the fragmentation."""
    machine = make(PAGES)
    region = machine.arena.reserve("weights", 4 * machine.page_bytes)
    region.commit(3 * machine.page_bytes + 1)
    report = machine.arena.report()
    assert report.committed_bytes == 4 * machine.page_bytes
    assert report.fragmentation == pytest.approx((machine.page_bytes - 1) / (4 * machine.page_bytes))
    region.commit(0)
    assert machine.arena.report().kept_bytes == 4 * machine.page_bytes
    released = machine.arena.trim(machine.page_bytes)
    assert released.counted_bytes == released.measured_bytes == 3 * machine.page_bytes
    machine.close()


def test_foreign_memory_is_named_when_the_gpu_is_full() -> None:
    machine = Machine(8, real=False, spare_pages=-4)
    region = machine.arena.reserve("weights", 8 * machine.page_bytes)
    with pytest.raises(MemoryError, match="something outside the pool uses them"):
        region.commit(6 * machine.page_bytes)
    assert machine.arena.committed_bytes == 0
    region.commit(4 * machine.page_bytes)
    machine.close()


@on_each_machine
def test_addresses_outlive_the_region_as_long_as_a_tensor_does(make: MakeMachine) -> None:
    machine = make(4)
    region = machine.arena.reserve("a", machine.page_bytes)
    address = region.address
    tensor = region.tensor(torch.uint8, (16,))
    region.close()
    del region
    assert machine.arena.reserve("b", machine.page_bytes).address != address, "a live tensor's addresses were given away"
    del tensor
    machine.arena.trim()
    assert machine.arena.reserve("c", 3 * machine.page_bytes).address is not None
    machine.close()


@on_each_machine
def test_views_reject_what_is_not_reserved(make: MakeMachine) -> None:
    machine = make(4)
    region = machine.arena.reserve("a", machine.page_bytes)
    with pytest.raises(ValueError, match="are reserved"):
        region.tensor(torch.float32, (machine.page_bytes,))
    with pytest.raises(ValueError, match="region a exists"):
        machine.arena.reserve("a", 1)
    with pytest.raises(MemoryError, match="reserved"):
        region.commit(2 * machine.page_bytes)
    machine.close()


@on_each_machine
def test_any_thread_may_commit(make: MakeMachine) -> None:
    """Loads run beside steps: regions are used by different threads at once, and capacity holds."""
    machine = make(PAGES)
    regions = [machine.arena.reserve(f"region-{number}", 8 * machine.page_bytes) for number in range(4)]
    failures: list[BaseException] = []

    def churn(region: CudaRegion) -> None:
        for size in [8, 3, 6, 0] * 10:
            try:
                region.commit(size * machine.page_bytes)
            except MemoryError:
                continue
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=churn, args=(region,)) for region in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    machine.arena.check()
    machine.close()


@on_each_machine
def test_kept_pages_leave_room_for_what_is_not_of_the_pool(make: MakeMachine) -> None:
    """Rule 3: what nobody of the pool uses is never in the way of the libraries that compute in it."""
    machine = make(PAGES)
    arena, size = machine.arena, machine.page_bytes
    region = arena.reserve("r", 8 * size)
    region.commit(8 * size)
    region.commit(2 * size)
    free, _ = arena.driver.memory_info()
    arena.leave_free(free)
    assert arena.report().kept_bytes == 6 * size, "there is room as it is"
    arena.leave_free(free + 2 * size - 1)
    assert arena.report().kept_bytes == 4 * size
    arena.leave_free(free + 100 * size)
    assert (arena.report().kept_bytes, region.committed_bytes) == (0, 2 * size), "what is in use stays"
    region.close()
