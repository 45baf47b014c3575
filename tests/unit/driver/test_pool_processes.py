"""A driver, real rank processes and a gateway's stream; only the engine is scripted."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from conftest import SECRET, PoolFactory, assignment, until
from scripted_rank import CRASH, FAIL, SLOW

from gateway.api.pool_channel import TLS_SCHEME
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.runtime import SECRET_METADATA_KEY
from workers.driver import rank_link
from workers.driver.rank_link import listens
from workers.messages import GrowKv, Hello, encode
from workers.rank.config import NONCE_BYTES, socket_path


def doubling(prompt: list[int], count: int) -> list[int]:
    total, text = sum(prompt), []
    for _ in range(count):
        text.append(total % 1000)
        total += text[-1]
    return text


@pytest.mark.parametrize("tls", [False, True])
async def test_a_prompt_is_answered_over_the_link(make_pool: PoolFactory, tls: bool) -> None:
    pool = await make_pool(assignment(), tls=tls)
    assert pool.driver.record().endpoint.startswith(TLS_SCHEME) == tls
    link = await pool.link()
    number = await link.submit([5, 6], max_tokens=4)
    end = await link.end_of(number)
    assert link.tokens[number] == doubling([5, 6], 4)
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 2, 4)


async def test_one_frame_a_step_with_the_tokens_of_all_requests_and_fresh_loads(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment())
    link = await pool.link()
    numbers = [await link.submit([5, seed], max_tokens=10) for seed in range(3)]
    for number in numbers:
        await link.end_of(number)
    together = [frame for frame in link.frames if len(frame.tokens) == 3]
    # Who is slow to read gets several steps in one frame.
    assert any(all(len(tokens.ids) == 1 for tokens in frame.tokens) for frame in together)
    assert max(load.outstanding_tokens for frame in link.frames for load in frame.loads if load.model == "m") > 0


async def test_two_models_of_a_two_rank_pool_answer(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment("one", (1,)), assignment("both", (0, 1), stages=2), devices=2)
    link = await pool.link()
    one, both = await link.submit([1, 1], model="one"), await link.submit([2, 2], model="both")
    await link.end_of(one)
    await link.end_of(both)
    assert (link.tokens[one], link.tokens[both]) == (doubling([1, 1], 4), doubling([2, 2], 4))


async def test_cancel_stops_within_a_step(make_pool: PoolFactory) -> None:
    """Rule 10."""
    pool = await make_pool(assignment())
    link = await pool.link()
    slow = await link.submit([SLOW, 1], max_tokens=30)
    while slow not in link.tokens:
        await link.next()
    started = time.monotonic()
    await link.cancel(slow)
    end = await link.end_of(slow)
    assert end.finish_reason == "cancelled"
    assert time.monotonic() - started < 0.9
    await until(lambda: not pool.driver.loop.core.state.groups[1].steps, pool.driver.record, 3)
    assert not pool.driver.loop.core.state.sequences


async def test_a_stream_that_ends_cancels_its_requests(make_pool: PoolFactory) -> None:
    """Rule 10: a client (here a whole gateway) that left is cancelled within a step."""
    pool = await make_pool(assignment())
    link, other = await pool.link(), await pool.link()
    number = await link.submit([SLOW, 1], max_tokens=30)
    stays = await other.submit([1, 2], max_tokens=3)
    while number not in link.tokens:
        await link.next()
    link.call.cancel()
    await until(lambda: all(key[0] != 1 for key in pool.driver.loop.core.state.sequences), pool.driver.record, 3)
    assert (await other.end_of(stays)).finish_reason == "length"


async def test_a_failed_step_is_reported_and_the_rank_serves_on(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment())
    pids = pool.pids
    link = await pool.link()
    end = await link.end_of(await link.submit([FAIL, 1]))
    assert (end.error_code, "told to fail" in end.error_message) == ("internal", True)
    assert (await link.end_of(await link.submit([1, 2]))).finish_reason == "length"
    assert pool.pids == pids


async def test_a_failed_step_of_a_group_of_two_restarts_its_ranks(make_pool: PoolFactory) -> None:
    """Rule 11: its peers would wait for ever."""
    pool = await make_pool(assignment(ranks=(0, 1), stages=2), devices=2)
    pids = pool.pids
    link = await pool.link()
    end = await link.end_of(await link.submit([FAIL, 1]))
    assert end.finish_reason == "error"
    await until(lambda: pool.driver.record().message != "", pool.driver.record)
    await pool.until_ready()
    assert not set(pids) & set(pool.pids)
    assert (await link.end_of(await link.submit([1, 2]))).finish_reason == "length"


@pytest.mark.parametrize("how", ["crash", "kill"])
async def test_a_lost_rank_ends_requests_within_a_second_and_heals(make_pool: PoolFactory, how: str) -> None:
    """Rule 11."""
    pool = await make_pool(assignment("one", (0,)), assignment("both", (0, 1), stages=2), devices=2)
    link = await pool.link()
    hurt = await link.submit([SLOW, 1], max_tokens=30, model="one")
    while hurt not in link.tokens:
        await link.next()
    started = time.monotonic()
    if how == "kill":
        os.kill(pool.pids[1], signal.SIGKILL)
    else:
        await link.submit([CRASH, 1], model="both")
    end = await link.end_of(hurt)
    assert (end.error_code, time.monotonic() - started < 3) == ("unavailable", True)
    assert end.retry_after_ms > 0
    early = await link.end_of(await link.submit([3, 3], model="both"))
    assert (early.error_code, early.retry_after_ms > 0) == ("unavailable", True)
    await pool.until_ready()
    assert (await link.end_of(await link.submit([3, 3], model="both"))).finish_reason == "length"
    pool.driver.check_health()


async def test_a_new_driver_adopts_the_ranks_of_the_old(make_pool: PoolFactory) -> None:
    """Ranks outlive the driver; sequences of the old one are forgotten, models are not loaded again."""
    pool = await make_pool(assignment("one", (0,)), assignment("both", (0, 1), stages=2), devices=2)
    pids = pool.pids
    link = await pool.link()
    await link.submit([SLOW, 1], max_tokens=30, model="both")
    await link.next()
    old_launcher = pool.driver.loop._ranks._launcher
    await pool.driver.loop.close(end_ranks=False)  # as if it were gone: nothing is said to the ranks
    await pool.driver._server.stop(0)
    await asyncio.sleep(0.5)  # what was sent has arrived on all ranks: those that disagree on it are not adopted
    endpoint = pool.driver.endpoint
    pool.new_driver()
    started = time.monotonic()
    await pool.start()
    await pool.until_ready()
    assert pool.driver.endpoint == endpoint, "gateways find it also while Redis is away (rule 12)"
    assert time.monotonic() - started < 10
    assert pool.pids == pids
    await pool.assign(assignment("one", (0,)), assignment("both", (0, 1), stages=2))
    link = await pool.link()
    for model in ("one", "both"):
        number = await link.submit([4, 4], model=model)
        assert (await link.end_of(number)).finish_reason == "length"
        assert link.tokens[number] == doubling([4, 4], 4)
    await old_launcher.stop()


async def test_a_driver_that_stops_leaves_the_ranks_to_its_successor(make_pool: PoolFactory) -> None:
    """Rule 1: it finishes what it can, and starts nothing when another has taken the ranks from it."""
    pool = await make_pool(assignment(ranks=(0, 1), stages=2), devices=2)
    pids, old = pool.pids, pool.driver
    link = await pool.link()
    await link.submit([SLOW, 1], max_tokens=30)
    await link.next()
    stopping = asyncio.create_task(old.stop(end_ranks=False))
    await until(lambda: old.loop.core.state.closing, old.record)
    pool.new_driver()
    await pool.start()
    await pool.until_ready()
    await stopping
    await pool.until_ready()
    assert pool.pids == pids
    await old.loop._ranks._launcher.stop()


async def test_a_driver_waits_for_the_one_before_it_to_end(make_pool: PoolFactory) -> None:
    """Rule 1: a pool has one driver, also while the earlier one still lets its requests finish."""
    pool = await make_pool(assignment())
    port = pool.driver.endpoint.rpartition(":")[2]
    launcher = pool.driver.loop._ranks._launcher
    await pool.driver.loop.close(end_ranks=False)
    await pool.driver._server.stop(0)
    earlier = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        (Path(pool.runtime.run_dir) / "pools" / "p" / "driver.port").write_text(f"{port} {earlier.pid}")
        pool.new_driver()
        starting = asyncio.create_task(pool.start())
        done, _ = await asyncio.wait([starting], timeout=1.0)
        assert not done
    finally:
        earlier.kill()
        await earlier.wait()
    await starting
    assert pool.driver.endpoint.endswith(f":{port}")
    await pool.until_ready()
    await launcher.stop()


async def test_ranks_that_disagree_on_what_they_received_are_not_adopted(make_pool: PoolFactory) -> None:
    """A driver that died between two sends of one step leaves collectives that can never match."""
    pool = await make_pool(assignment(ranks=(0, 1), stages=2), devices=2)
    pids = pool.pids
    directory = Path(pool.runtime.run_dir) / "pools" / "p"
    launcher = pool.driver.loop._ranks._launcher
    await pool.driver.loop.close(end_ranks=False)
    await pool.driver._server.stop(0)
    half = await rank_link.connect(0, f"unix:{socket_path(directory, 0)}", SECRET, "half a driver")
    half.send(GrowKv(op=5, group_id=1, blocks=200))
    await half.expect_done(5)
    half.close()
    pool.new_driver()
    await pool.start(assignment(ranks=(0, 1), stages=2))
    assert not set(pids) & set(pool.pids)
    await launcher.stop()


async def test_a_rank_without_a_driver_frees_itself_and_exits(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment(), grace_s=1.0)
    pid = pool.pids[0]
    await pool.driver.loop.close(end_ranks=False)
    await until(
        lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), lambda: pid, 10
    )
    assert not await listens(f"unix:{socket_path(Path(pool.runtime.run_dir) / 'pools' / 'p', 0)}")


async def test_a_rank_talks_to_nobody_without_the_secret(make_pool: PoolFactory) -> None:
    """Rule 15."""
    pool = await make_pool(assignment())
    socket = socket_path(Path(pool.runtime.run_dir) / "pools" / "p", 0)
    assert socket.stat().st_mode & 0o077 == 0
    seen: set[bytes] = set()
    for frame in (encode(Hello(secret="wrong", driver="x")), b"\0\0\0\4oops", b"\x7f\xff\xff\xff"):
        reader, writer = await asyncio.open_unix_connection(str(socket))
        nonce = await reader.readexactly(NONCE_BYTES)
        assert nonce not in seen
        seen.add(nonce)
        writer.write(frame)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    link = await pool.link()
    assert (await link.end_of(await link.submit([1, 2]))).finish_reason == "length"


async def test_every_call_needs_the_secret(make_pool: PoolFactory) -> None:
    """Rule 15."""
    pool = await make_pool(assignment())
    async with grpc.aio.insecure_channel(pool.driver.endpoint) as channel:
        control = pool_pb2_grpc.PoolControlStub(channel)
        for metadata in ((), ((SECRET_METADATA_KEY, "wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await control.Describe(pool_pb2.DescribePoolRequest(), metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            call = pool_pb2_grpc.PoolLinkStub(channel).Link(metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_an_older_fence_is_refused_over_the_wire(make_pool: PoolFactory) -> None:
    pool = await make_pool(assignment())
    await pool.assign(assignment(), fence=7)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.assign(fence=6)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    described = await pool.control.Describe(pool_pb2.DescribePoolRequest(), metadata=pool.metadata)
    assert '"fence":7' in described.pool_json


async def test_a_load_that_fails_says_why_and_leaves_nothing(make_pool: PoolFactory) -> None:
    """Rule 3."""
    pool = await make_pool(assignment())
    await pool.assign(assignment(), assignment("bad", source="file:broken"))
    await until(lambda: any(group.state == "failed" for group in pool.driver.record().groups), pool.driver.record)
    bad = next(group for group in pool.driver.record().groups if group.model == "bad")
    assert "told to have no memory" in bad.reason
    await until(lambda: all(line[0] != "bad" for line in pool.driver.record().ranks[0].ledger), pool.driver.record)


async def test_one_model_loads_while_another_answers(make_pool: PoolFactory) -> None:
    """Rule 7."""
    pool = await make_pool(assignment())
    link = await pool.link()
    await pool.assign(assignment(), assignment("late", source="file:slow"))
    await until(lambda: any(group.state == "loading" for group in pool.driver.record().groups), pool.driver.record)
    number = await link.submit([1, 2], max_tokens=20)
    held = await link.submit([1, 2], model="late")
    await link.end_of(number)
    assert any(group.state == "loading" for group in pool.driver.record().groups)
    assert (await link.end_of(held)).finish_reason == "length"
    assert link.holds[held].estimated_wait_ms > 0


async def test_groups_that_share_ranks_never_wait_for_each_other_crosswise(make_pool: PoolFactory) -> None:
    """All commands of a pool are in one order, so that exchanges over MPI meet; a group need not take part in another's."""
    groups = [assignment("a", (0, 1), stages=2), assignment("b", (2, 1), stages=2), assignment("c", (1, 0), stages=2)]
    pool = await make_pool(*groups, assignment("d", (2,)), devices=3)
    link = await pool.link()
    asked = {await link.submit([seed, 7], max_tokens=40, model=model): seed for seed in range(1, 4) for model in "abcd"}
    for number, seed in asked.items():
        assert (await link.end_of(number)).finish_reason == "length"
        assert link.tokens[number] == doubling([seed, 7], 40)
