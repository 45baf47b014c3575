"""Parks and wakes in real rank processes with the scripted engine, and an admin's way to them."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from conftest import SECRET, Pool, PoolFactory, assignment, until

from gateway.api.errors import ErrorCode, YardError
from gateway.servers.residency import set_residency
from workers.driver import local_ranks, overdue


async def set_to(pool: Pool, residency: str, model: str = "m") -> dict[str, str]:
    return await set_residency([pool.driver.record()], SECRET, model, residency)


def standing(pool: Pool) -> list[str]:
    return [group.residency or group.state for group in pool.driver.record().groups]


async def restart_driver(pool: Pool, *groups) -> None:
    """As a crash would: ranks stay, whatever they are at."""
    await pool.driver.loop.close(end_ranks=False)
    await pool.driver._server.stop(0)
    pool.new_driver()
    await pool.start()
    await pool.assign(*groups, fence=2)


async def test_an_operator_parks_and_a_request_wakes(make_pool: PoolFactory) -> None:
    """Rules 5 and 6."""
    pool = await make_pool(assignment(ranks=(0, 1), stages=2), devices=2)
    assert (await set_to(pool, "parked")) == {"p": "parking"}
    await until(lambda: standing(pool) == ["parked"], pool.driver.record, 10)
    assert [rank.ledger for rank in pool.driver.record().ranks] == [(), ()]
    link = await pool.link()
    numbers = [await link.submit([5, 6], max_tokens=4) for _ in range(8)]
    for number in numbers:
        await link.end_of(number)
    assert {tuple(link.tokens[number]) for number in numbers} == {(11, 22, 44, 88)}
    assert link.holds[numbers[0]].estimated_wait_ms > 0
    assert {switch.path: switch.count for switch in pool.driver.record().switches}["wake"] == 1
    pool.driver.loop.core.state.check()


async def test_rule_11_a_rank_that_is_stopped_and_does_not_park_is_started_again(
    make_pool: PoolFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 11, where no request is in flight."""
    monkeypatch.setattr(overdue, "FLOOR_S", 1.0)
    monkeypatch.setattr(local_ranks, "STOP_TIMEOUT_S", 1.0)
    pool = await make_pool(assignment())
    [stopped] = pool.pids
    os.kill(stopped, signal.SIGSTOP)
    await set_to(pool, "parked")
    await until(lambda: pool.pids not in ([], [stopped]) and standing(pool) == ["ready"], pool.driver.record)
    assert not psutil.pid_exists(stopped)
    link = await pool.link()
    await link.end_of(await link.submit([5, 6], max_tokens=2))
    assert link.tokens[1] == [11, 22]


async def test_an_operator_is_told_what_cannot_be(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment())
    for model, residency, code in (("other", "parked", ErrorCode.NOT_FOUND), ("m", "warm", ErrorCode.INVALID)):
        with pytest.raises(YardError) as refused:
            await set_to(pool, residency, model)
        assert refused.value.code is code


async def test_a_driver_lost_during_a_wake_leaves_it_parked_for_the_next(make_pool: PoolFactory) -> None:
    """What the next driver is told is what is: nothing holds memory that its ledger does not know."""
    pool = await make_pool(assignment())
    await set_to(pool, "parked")
    await until(lambda: standing(pool) == ["parked"], pool.driver.record, 10)
    assert (await set_to(pool, "resident")) == {"p": "waking"}
    await asyncio.sleep(0.1)
    pids = pool.pids
    await restart_driver(pool, assignment())
    await until(lambda: standing(pool) == ["parked"] and pool.pids == pids, pool.driver.record, 20)
    link = await pool.link()
    number = await link.submit([5, 6], max_tokens=4)
    await link.end_of(number)
    assert link.tokens[number] == [11, 22, 44, 88]
    assert {kind for _, kind, _ in pool.driver.record().ranks[0].ledger} == {"weights", "kv_floor"}


async def test_sequences_of_a_driver_that_is_gone_do_not_keep_a_model_from_parking(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment())
    link = await pool.link()
    await link.submit([7, 7], max_tokens=50)
    while not link.tokens:
        await link.next()
    await restart_driver(pool, assignment())
    await pool.until_ready()
    await set_to(pool, "parked")
    await until(lambda: standing(pool) == ["parked"], pool.driver.record, 10)
