"""rule 11: health is forward progress. A replica that computes nothing leaves the rotation and comes back by a probe."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.pool_pb2 import ModelLoad
from gateway.link import pool_link

REQUEST = pb.GenerateRequest(model="m", prompt="x", max_tokens=2)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_link, "STUCK_S", 0.2)
    monkeypatch.setattr(pool_link, "PROBE_S", 0.1)


def in_rotation(lone: LoneGateway) -> set[str]:
    return {link.pool for link in lone.links.rotation("m")}


async def stuck_request(lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> tuple[asyncio.Future, SubmittedSequence]:
    """A request that pool `a` has and says nothing of."""
    lone.links._links["b"].load.told(ModelLoad(model="m", outstanding_tokens=10_000))
    answer = asyncio.ensure_future(lone.inference.Generate(REQUEST, timeout=20))
    return answer, await pool.next()


async def test_rule_11_a_stuck_replica_leaves_and_its_requests_are_answered_elsewhere(
    hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, byte_level: Path
) -> None:
    """rule 11, and rule 9: what has not begun gets one try on another replica."""
    answer, sequence = await stuck_request(lone, pool, other)
    other.script = lambda submitted: submitted.end("length", tokens=ids_of(byte_level, "yes"))
    await until(lambda: in_rotation(lone) == {"b"})
    assert (await answer).choices[0].text == "yes"
    await sequence.cancelled.wait()
    # Probes come, one after the other; as long as none is answered, requests go elsewhere.
    first, second = await pool.next(), await pool.next()
    assert first.submit.shadow
    assert first.submit.max_tokens == 1
    await first.cancelled.wait()
    assert in_rotation(lone) == {"b"}
    second.end("length", tokens=[1])
    await until(lambda: in_rotation(lone) == {"a", "b"})
    await asyncio.sleep(0.3)
    assert pool.idle(), "nothing is probed that works"


async def test_a_request_that_is_held_is_no_sign_of_a_stuck_replica(
    hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool
) -> None:
    """rule 6: it waits for its model."""
    answer, sequence = await stuck_request(lone, pool, other)
    sequence.hold("loading", 60_000)
    link = lone.links._links["a"]
    await until(lambda: link._held)
    await asyncio.sleep(0.4)
    assert in_rotation(lone) == {"a", "b"}
    sequence.end("length", tokens=[5])
    await answer


async def test_an_idle_replica_is_not_stuck(hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> None:
    await asyncio.sleep(0.4)
    assert in_rotation(lone) == {"a", "b"}
    answer, sequence = await stuck_request(lone, pool, other)
    assert in_rotation(lone) == {"a", "b"}
    sequence.end("length", tokens=[5])
    await answer


async def test_rule_11_a_long_prompt_that_goes_on_is_progress(
    hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool
) -> None:
    """rule 11: steps count, also those that gave no token yet; nothing is computed twice for it."""
    answer, sequence = await stuck_request(lone, pool, other)
    for step in range(1, 13):
        pool.report_step(step)
        await asyncio.sleep(0.05)
        assert in_rotation(lone) == {"a", "b"}
    assert other.idle()
    sequence.end("length", tokens=[5])
    await answer


async def test_rule_11_what_had_begun_on_a_stuck_replica_ends(
    hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool
) -> None:
    """rule 9 and 11: UNAVAILABLE, not tried again, and not left to the client's deadline."""
    answer, sequence = await stuck_request(lone, pool, other)
    sequence.tokens([5])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert other.idle()
    assert in_rotation(lone) == {"b"}


async def test_a_driver_that_falls_silent_after_its_heartbeat_expired(
    lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rule 11: its connection is still open, and nobody asks for it any more. What began ends; what has not goes elsewhere."""
    monkeypatch.setattr(pool_link, "SILENT_S", 0.3)
    other.script = lambda submitted: submitted.end("length", tokens=ids_of(byte_level, "yes"))
    waiting, _ = await stuck_request(lone, pool, other)
    begun, sequence = await stuck_request(lone, pool, other)
    sequence.tokens([5])
    link = lone.links._links["a"]
    lone.forget(pool)
    assert (await waiting).choices[0].text == "yes"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await begun
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "heartbeat" in (caught.value.details() or "")
    assert link.in_flight == 0
    await asyncio.wait([link._task], timeout=5)
    assert link.closed


async def test_a_driver_that_only_redis_lost_goes_on(
    lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rule 12: without its heartbeats it takes nothing new, and what it computes is finished."""
    monkeypatch.setattr(pool_link, "SILENT_S", 0.6)
    answer, sequence = await stuck_request(lone, pool, other)
    lone.forget(pool)
    for step in range(1, 11):
        pool.report_step(step)
        await asyncio.sleep(0.15)
    sequence.end("length", tokens=[5])
    await answer


async def test_a_frozen_process_holds_no_request(lone: LoneGateway, monkeypatch: pytest.MonkeyPatch, byte_level: Path) -> None:
    """The same with a real process that is stopped: ending the link needs nothing from the other side."""
    monkeypatch.setattr(pool_link, "SILENT_S", 0.3)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("scripted_pool.py")), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        lone.texts["cold"] = byte_level
        lone.put_model("cold")
        frozen = ScriptedPool("frozen", ["cold"])
        frozen.port = int(await process.stdout.readline())
        lone.observe(frozen)
        await lone.wait_up("frozen")
        call = lone.inference.GenerateStream(pb.GenerateRequest(model="cold", prompt="x", max_tokens=9), timeout=60)
        await call.read()
        process.send_signal(signal.SIGSTOP)
        lone.forget(frozen)
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert lone.links.in_flight == 0
    finally:
        process.kill()
        await process.wait()


async def test_a_lost_link_ends_its_probes(hasty: None, lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> None:
    answer, _ = await stuck_request(lone, pool, other)
    other.script = lambda submitted: submitted.end("length", tokens=[5])
    await until(lambda: in_rotation(lone) == {"b"})
    await answer
    link = lone.links._links["a"]
    probe = link._probe
    assert probe is not None
    await pool.stop()
    await asyncio.wait([probe], timeout=5)
    await pool.start()
    await lone.wait_up("a")
    assert in_rotation(lone) == {"a", "b"}
