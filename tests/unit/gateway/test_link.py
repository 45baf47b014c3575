"""The links between a gateway and the pool drivers: reconnecting, restarts, expiry, batching, and never hanging."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import msgspec
import pytest
from lone_gateway import LoneGateway, ids_of
from scripted_pool import SECRET, ScriptedPool

from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto.pool_pb2 import End, Submit, Tokens
from gateway.api.records import RankRecord
from gateway.link.flight import Flight, Lost
from gateway.link.link_set import LinkSet
from gateway.link.pool_link import PoolLink
from gateway.state.snapshot import Observed


def link_of(lone: LoneGateway, pool: str = "a") -> PoolLink:
    return next(link for link in lone.links.holding("m") if link.pool == pool)


def submit(model: str = "m", prompt: int = 3, max_tokens: int = 5) -> Submit:
    return Submit(model=model, prompt_ids=[1] * prompt, max_tokens=max_tokens)


async def test_many_requests_share_one_stream(lone: LoneGateway, pool: ScriptedPool) -> None:
    """Submits of one turn of the loop leave in one frame; what a down frame brings wakes each request once."""
    link = link_of(lone)
    flights = [Flight() for _ in range(20)]
    for flight in flights:
        link.submit(flight, [submit(), submit()])
    sequences = [await pool.next() for _ in range(40)]
    assert len({sequence.submit.id for sequence in sequences}) == 40
    assert pool.frames_up == 2
    assert pool.gateways == ["gateway-under-test"]
    sequences[1].tokens([7])
    sequences[1].end("length")
    events = await flights[0].receive()
    while len(events) < 2:
        events += await flights[0].receive()
    assert [(index, type(event)) for index, event in events] == [(1, Tokens), (1, End)]
    assert link.in_flight == 39


async def test_the_link_comes_back(lone: LoneGateway, pool: ScriptedPool) -> None:
    link = link_of(lone)
    flight = Flight()
    link.submit(flight, [submit(), submit()])
    await pool.next()
    await pool.stop()
    [(index, lost)] = await flight.receive()
    assert (index, type(lost)) == (-1, Lost)
    assert link.in_flight == 0
    with pytest.raises(YardError) as caught:
        link.submit(Flight(), [submit()])
    assert caught.value.code is ErrorCode.UNAVAILABLE
    await pool.start()
    await lone.wait_up("a")
    link.submit(Flight(), [submit()])


async def test_a_restarted_driver_gets_a_new_link(lone: LoneGateway, pool: ScriptedPool) -> None:
    """Another incarnation: what was in flight is lost with the old stream, new requests go to the new one."""
    old = link_of(lone)
    await pool.stop()
    await pool.start()
    lone.observe(pool)
    await lone.wait_up("a")
    new = link_of(lone)
    assert new is not old
    assert old.retired
    assert new.incarnation == "2"


async def test_an_expired_heartbeat_takes_no_new_requests_and_lets_the_running_finish(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path
) -> None:
    link = link_of(lone)
    flight = Flight()
    link.submit(flight, [submit()])
    sequence = await pool.next()
    lone.forget(pool)
    assert lone.links.holding("m") == []
    sequence.end("length", tokens=ids_of(byte_level, "yes"))
    received = 0
    while received < 2:
        received += len(await flight.receive())
    await asyncio.wait([link._task], timeout=5)
    assert link.closed


async def test_an_expired_pool_that_is_gone_is_not_tried_for_ever(lone: LoneGateway, pool: ScriptedPool) -> None:
    link = link_of(lone)
    await pool.stop()
    await lone.wait_up("a", False)
    lone.forget(pool)
    await asyncio.wait([link._task], timeout=5)
    assert link.closed


async def test_the_wrong_secret(pool: ScriptedPool) -> None:
    """rule 15: the driver refuses, the link says why and keeps trying."""
    await pool.start()
    links = LinkSet(gateway="g", secret=SECRET + "!")
    links.reconcile({"a": pool.record()})
    [link] = links.holding("m")
    try:
        async with asyncio.timeout(5):
            while "wrong secret" not in link.reason:
                await links.wait_change(1.0)
        assert not link.closed
    finally:
        await links.close()
        await pool.stop()


async def test_load_is_what_the_driver_said_plus_what_was_sent_since(lone: LoneGateway, pool: ScriptedPool) -> None:
    link = link_of(lone)
    flight = Flight()
    link.submit(flight, [submit(prompt=1, max_tokens=1)])
    await pool.next()
    await say_load(pool, flight, 100)
    assert link.outstanding_tokens("m") == 100
    link.submit(Flight(), [submit(prompt=30, max_tokens=20)])
    assert link.outstanding_tokens("m") == 150
    await pool.next()
    await say_load(pool, flight, 40)
    assert link.outstanding_tokens("m") == 40


async def say_load(pool: ScriptedPool, flight: Flight, tokens: int) -> None:
    """Returns when the load has arrived: frames come in order, and a token follows it."""
    sequence = pool.sequences[0]
    pool.report_load("m", tokens)
    sequence.tokens([1])
    async with asyncio.timeout(5):
        await flight.receive()


async def test_requests_go_where_the_load_is_less(lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> None:
    flight = Flight()
    link_of(lone).submit(flight, [submit()])
    await pool.next()
    await say_load(pool, flight, 10_000)
    calls = [lone.path.choice.choose(lone.links.holding("m"), "m") for _ in range(10)]
    assert {link.pool for link in calls if link is not None} == {"b"}


async def test_a_pool_whose_groups_are_all_parked_is_asked(lone: LoneGateway, pool: ScriptedPool) -> None:
    """rule 6: the driver holds the request and wakes the model; the gateway only has to send it there."""
    lone.observe(pool, state="parked")
    assert [link.pool for link in lone.links.holding("m")] == ["a"]
    assert lone.links.answering("m")
    lone.observe(pool, state="loading")
    assert [link.pool for link in lone.links.holding("m")] == ["a"]
    assert not lone.links.answering("m"), "a route has something better to ask than what still loads"
    down = msgspec.structs.replace(pool.record(state="loading"), ranks=(RankRecord(0, "here", 1, "cpu", 1, alive=False),))
    lone.view.apply_observed(Observed({"a": down}, {}, None))
    assert lone.links.holding("m") == [], "nobody knows when its ranks are back"
    lone.observe(pool, state="failed")
    assert lone.links.holding("m") == []


async def test_a_driver_that_stops_answering_hangs_nobody(lone: LoneGateway, pool: ScriptedPool) -> None:
    """A stalled driver: the caller's deadline ends the request, the cancel is sent, and the link stays for others."""
    from gateway.api.proto.inference_pb2 import GenerateRequest

    call = lone.inference.Generate(GenerateRequest(model="m", prompt="x"), timeout=0.5)
    sequence = await pool.next()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(2):
        await sequence.cancelled.wait()
    assert link_of(lone).up
