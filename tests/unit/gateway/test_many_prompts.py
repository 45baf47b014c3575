"""Requests of more sequences than a pool takes at once: they pass piece by piece, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool, SubmittedSequence

ROOM = 8  # of a model with concurrency 4


class Crowd:
    """Ends each sequence of a pool a moment after it came, and remembers how many there were at once."""

    def __init__(self, pool: ScriptedPool, answer: list[int]) -> None:
        self.most = self.running = self.taken = 0
        self._answer = answer
        pool.script = self._take

    def _take(self, sequence: SubmittedSequence) -> None:
        self.taken += 1
        self.running += 1
        self.most = max(self.most, self.running)
        asyncio.get_running_loop().call_later(0.01, self._end, sequence)

    def _end(self, sequence: SubmittedSequence) -> None:
        self.running -= 1
        sequence.end("length", tokens=self._answer, completion_tokens=1)


@pytest.fixture
async def crowd(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> Crowd:
    lone.put_model("m", concurrency=ROOM // 2, queue=4)
    return Crowd(pool, ids_of(byte_level, "yes"))


async def ask(lone: LoneGateway, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=15) as client:
        return await client.post(f"{lone.http}/v1/completions", json={"model": "m", **body})


async def test_more_sequences_than_the_pools_take(lone: LoneGateway, crowd: Crowd) -> None:
    """None of them holds its place while it waits for another's, so two such requests cannot lock each other."""
    many = [ask(lone, prompt=[f"prompt {index}" for index in range(20)], n=3) for _ in range(2)]
    answers = await asyncio.gather(*many, ask(lone, prompt="alone"))
    assert [response.status_code for response in answers] == [200, 200, 200]
    for response in answers[:2]:
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(60))
        assert {choice["text"] for choice in response.json()["choices"]} == {"yes"}
    assert crowd.most <= ROOM
    assert lone.path.gate._models["m"].inside == 0


async def test_a_stream_of_many_prompts(lone: LoneGateway, crowd: Crowd) -> None:
    response = await ask(lone, prompt=["x"] * 40, stream=True)
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.text.count('"finish_reason":"length"') == 40


async def test_what_is_wrong_with_one_prompt_is_said_before_any_runs(lone: LoneGateway, crowd: Crowd) -> None:
    response = await ask(lone, prompt=[[5]] * 19 + [[10**6]])
    assert response.status_code == 400
    assert "1000000" in response.json()["error"]["message"]
    assert not crowd.taken


async def test_a_client_that_leaves_ends_those_that_wait_too(lone: LoneGateway, pool: ScriptedPool) -> None:
    """rule 10"""
    lone.put_model("m", concurrency=1)
    call = asyncio.create_task(ask(lone, prompt=["x"] * 20))
    first, second = await pool.next(), await pool.next()
    await until(lambda: lone.path.gate.waiting)
    call.cancel()
    await first.cancelled.wait()
    await second.cancelled.wait()
    await until(lambda: not lone.path.gate.waiting)
    assert pool.idle()
    assert lone.path.gate._models["m"].inside == 0
