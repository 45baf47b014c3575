"""A pool that hosts TensorRT-LLM alone: its driver, the servers of its models over the stand-in, and a gateway's link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool_over_standin import Pool, assignment, until
from trtllm_environment import mpi_variables

from gateway.api.config import EngineSpec
from gateway.api.records import GroupRecord

MIB = 2**20


@pytest.fixture
async def make_pool(tmp_path: Path, environment: Callable[..., Path], checkpoint: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await make_pool(names, devices=1, version=…, …)`: a pool with these models ready."""
    pools: list[Pool] = []

    async def make(*names: str, devices: int = 1, version: str = "1.4.0rc1", memory: int = 8000 * MIB, **options: Any) -> Pool:
        site = {key: options.pop(key) for key in ("launch", "park") if key in options}
        changes = options.pop("changes", {})
        python = environment(version, **options)
        variables = mpi_variables(site.get("launch", "spawn"))
        settings = EngineSpec.model_validate({"python": str(python), "environment": variables, **site})
        pool = Pool(tmp_path, settings, devices, memory)
        pools.append(pool)
        await pool.start()
        ranks = tuple(range(devices))
        await pool.assign(*(assignment(name, checkpoint, ranks, **changes.get(name, {})) for name in names))
        return pool

    yield make
    for pool in pools:
        await pool.stop()


def group(pool: Pool, model: str = "a") -> GroupRecord:
    return next(group for group in pool.driver.record().groups if group.model == model)


def ledger(pool: Pool, model: str = "a") -> dict[str, int]:
    return {kind: size for name, kind, size in pool.driver.record().ranks[0].ledger if name == model}


async def test_from_an_assignment_to_streamed_tokens(make_pool) -> None:
    pool = await make_pool("a", load_s=0.3)
    await pool.ready("a")
    link = await pool.link()
    request = await link.submit((5, 6, 7), 9, "a")
    end = await link.end_of(request)
    assert (end.finish_reason, link.tokens[request]) == ("length", [5, 6, 7] * 3)
    lines = ledger(pool)
    assert lines["kv_floor"] >= 2 * MIB
    assert sum(lines.values()) > 300 * MIB, "the ledger has what was measured, with the context of its process"
    events = [kind for kind, _, _ in pool.events]
    assert events.index("loading") < events.index("checking") < events.index("ready")


async def test_a_cancel_reaches_the_engine_and_a_stop_token_ends_without_being_sent(make_pool) -> None:
    """Rule 10."""
    pool = await make_pool("a")
    await pool.ready("a")
    link = await pool.link()
    endless = await link.submit((5, 6), 200, "a")
    await link.next()
    await link.cancel(endless)
    assert (await link.end_of(endless)).finish_reason == "cancelled"
    stopped = await link.submit((9, 8, 2), 50, "a")  # 2 is the checkpoint's end of text
    assert (await link.end_of(stopped)).finish_reason == "stop"
    assert link.tokens[stopped] == [9, 8]


async def test_loads_on_a_device_are_serialised_and_their_order_does_not_matter(make_pool) -> None:
    """Rule 4."""
    pool = await make_pool("a", "b", load_s=0.5)
    seen: list[set[str]] = []

    def both() -> bool:
        seen.append({group.model for group in pool.driver.record().groups if group.state == "loading"})
        return all(group.state == "ready" for group in pool.driver.record().groups)

    await until(both, pool.driver.record)
    assert {frozenset(models) for models in seen if models} == {frozenset({"a"}), frozenset({"b"})}
    assert ledger(pool, "a") == ledger(pool, "b")


@pytest.mark.parametrize("launch", ["spawn", "mpiexec"])
async def test_a_rank_that_crashes_takes_its_group_down_and_the_group_comes_back_as_one(make_pool, launch: str) -> None:
    """Rule 11: its requests get UNAVAILABLE. Rule 3: nothing is promised before the memory of the dead is measured to be free."""
    pool = await make_pool("a", devices=2, launch=launch, late_free_s=1.0)
    await pool.ready("a")
    link = await pool.link()
    request = await link.submit((5, 6), 240, "a")
    await link.next()
    pool.standin("crash-1").touch()
    assert (await link.end_of(request)).error_code == "unavailable"
    assert group(pool).state == "failed"
    assert sum(ledger(pool).values()) > 300 * MIB, "its place is kept while its memory is not free"
    await pool.ready("a")
    again = await link.submit((5, 6), 4, "a")
    assert (await link.end_of(again)).finish_reason == "length"


async def test_models_take_turns_in_memory_by_release_and_resume(make_pool) -> None:
    """Rule 6: a request for the parked one is held and wakes it."""
    pool = await make_pool("a", "b", memory=2100 * MIB)
    await until(lambda: {group(pool, m).state for m in "ab"} == {"ready", "parked"}, pool.driver.record)
    link = await pool.link()
    for model in ("a", "b", "a"):
        request = await link.submit((5, 6), 4, model)
        assert (await link.end_of(request)).finish_reason == "length"
        assert group(pool, model).state == "ready"
    switches = {record.path: record.count for record in pool.driver.record().switches}
    assert switches["park"] >= 2
    assert switches["wake"] >= 2
    parked = next(found for found in pool.driver.record().groups if found.state == "parked")
    assert ledger(pool, parked.model) == {"context": 100 * MIB}
    assert parked.standby_bytes > 0


async def test_where_the_version_cannot_park_it_unloads_and_loads(make_pool) -> None:
    pool = await make_pool("a", "b", version="1.2.1", memory=2100 * MIB)
    await until(lambda: {group(pool, m).residency for m in "ab"} == {"", "cold"}, pool.driver.record)
    link = await pool.link()
    cold = next(found.model for found in pool.driver.record().groups if found.residency == "cold")
    await until(lambda: ledger(pool, cold) == {}, pool.driver.record)
    request = await link.submit((5, 6), 4, cold)
    assert (await link.end_of(request)).finish_reason == "length"
    assert {record.path for record in pool.driver.record().switches} == {"load"}


async def test_what_the_version_lacks_fails_the_model_before_anything_is_started(make_pool) -> None:
    pool = await make_pool("a", changes={"a": {"precision": "fp8"}})
    await until(lambda: group(pool).state == "failed", pool.driver.record)
    assert "yard engine quantize" in group(pool).reason
    assert not list(pool.directory.glob("e*.pid"))


async def test_a_restarted_driver_takes_the_running_model_over(make_pool) -> None:
    pool = await make_pool("a")
    await pool.ready("a")
    [process] = [psutil.Process(int(path.read_text().split()[0])) for path in pool.directory.glob("e*.pid")]
    before = ledger(pool)
    await pool.restart_driver()
    await pool.ready("a")
    assert process.is_running()
    assert ledger(pool) == before
    link = await pool.link()
    request = await link.submit((5, 6), 4, "a")
    assert (await link.end_of(request)).finish_reason == "length"


async def test_an_engine_that_stalls_is_restarted(make_pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 11: health is forward progress."""
    monkeypatch.setattr("workers.driver.core.STALLED_S", 1.0)
    pool = await make_pool("a")
    await pool.ready("a")
    link = await pool.link()
    pool.standin("stall").touch()
    request = await link.submit((5, 6), 4, "a")
    assert (await link.end_of(request)).error_code == "unavailable"
    pool.standin("stall").unlink()
    await pool.ready("a")


async def test_a_drained_model_leaves_no_process_and_no_memory(make_pool) -> None:
    pool = await make_pool("a")
    await pool.ready("a")
    [process] = [psutil.Process(int(path.read_text().split()[0])) for path in pool.directory.glob("e*.pid")]
    await pool.assign(fence=2)
    await until(lambda: not pool.driver.record().groups, pool.driver.record)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert pool.driver.record().ranks[0].ledger == ()
