from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from workers.memory.arena import HOST_PAGE_BYTES, HostArena

PAGE = HOST_PAGE_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_stays_committed_keeps_its_place_and_its_values() -> None:
    arena = HostArena(100 * PAGE)
    region = arena.reserve("kv", 50 * PAGE)
    region.commit(10 * PAGE)
    tensor = region.tensor(torch.int64, (10 * PAGE // 8,))
    tensor[:] = 7
    address = tensor.data_ptr()
    region.commit(50 * PAGE)
    region.commit(2 * PAGE)
    again = region.tensor(torch.int64, (2 * PAGE // 8,))
    assert again.data_ptr() == address
    assert bool((again == 7).all())


def test_memory_that_is_given_back_leaves_the_process() -> None:
    """Rule 3: freed bytes are measured, not assumed."""
    arena = HostArena(100 * PAGE)
    region = arena.reserve("weights", 40 * PAGE)
    before = resident_bytes()
    region.commit(40 * PAGE)
    region.tensor(torch.uint8, (40 * PAGE,)).fill_(1)
    assert resident_bytes() - before > 38 * PAGE
    region.commit(10 * PAGE)
    assert resident_bytes() - before < 12 * PAGE
    region.close()
    assert resident_bytes() - before < 2 * PAGE
    assert (arena.committed_bytes, arena.regions()) == (0, {})


def test_a_commit_beyond_the_capacity_changes_nothing() -> None:
    arena = HostArena(10 * PAGE)
    first, second = arena.reserve("a", 10 * PAGE), arena.reserve("b", 10 * PAGE)
    first.commit(6 * PAGE)
    with pytest.raises(MemoryError, match=f"region b asks for {5 * PAGE} more bytes, {4 * PAGE} of {10 * PAGE} are free"):
        second.commit(5 * PAGE)
    assert (second.committed_bytes, arena.committed_bytes) == (0, 6 * PAGE)
    second.commit(4 * PAGE)


def test_a_name_is_reserved_once_and_free_after_close() -> None:
    arena = HostArena(10 * PAGE)
    region = arena.reserve("a", PAGE)
    with pytest.raises(ValueError, match="exists"):
        arena.reserve("a", PAGE)
    region.commit(PAGE)
    region.close()
    region.close()
    assert arena.committed_bytes == 0
    arena.reserve("a", PAGE)


def test_threads_that_load_and_compute_keep_one_account() -> None:
    """Loading runs beside the steps (rule 7)."""
    arena = HostArena(1000 * PAGE)

    def grow_and_shrink(name: str) -> None:
        region = arena.reserve(name, 50 * PAGE)
        for _ in range(200):
            region.commit(50 * PAGE)
            region.commit(PAGE)

    threads = [threading.Thread(target=grow_and_shrink, args=(f"r{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.committed_bytes == 8 * PAGE == sum(arena.regions().values())
