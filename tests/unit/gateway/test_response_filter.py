"""A route's filter: nothing leaves that it holds back, whatever the pieces, and its failure does what is declared."""

from __future__ import annotations

import time

import grpc
import pytest
from lone_gateway import LoneGateway, ids_of, one_by_one
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto import inference_pb2 as pb
from gateway.text import response_filter
from gateway.text.response_filter import Filtered
from gateway.text.word_filter import word_filter


def put_route(lone: LoneGateway, name: str = "words", on_failure: str = "closed", **options: str) -> None:
    given = {"name": name, "on_failure": on_failure, "timeout_ms": 2000 if name == "words" else 100}
    given["options"] = [list(pair) for pair in options.items()]
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "response_filter": given})


def answer(lone: LoneGateway, pool: ScriptedPool, text: str) -> list[SubmittedSequence]:
    asked: list[SubmittedSequence] = []

    def script(sequence: SubmittedSequence) -> None:
        asked.append(sequence)
        for ids in one_by_one(ids_of(lone.texts["m"], text)):
            sequence.tokens(ids)
        sequence.end("stop")

    pool.script = script
    return asked


async def streamed(lone: LoneGateway, **fields: object) -> tuple[list[str], int]:
    request = pb.GenerateRequest(model="chat", prompt="x", **fields)  # pyright: ignore[reportArgumentType]
    texts, finish = [], 0
    async for chunk in lone.inference.GenerateStream(request, timeout=20):
        for choice in chunk.choices:
            texts.append(choice.text)
            finish = choice.finish_reason or finish
    return texts, finish


async def test_words_are_replaced_across_pieces(lone: LoneGateway, pool: ScriptedPool) -> None:
    put_route(lone, words="secret, hidden thing")
    answer(lone, pool, "a seCRet and a sect of the hidden thing.se")
    texts, _ = await streamed(lone)
    assert "".join(texts) == "a *** and a sect of the ***.se"
    assert len(texts) > 1, "in pieces, however many of them came together"


async def test_a_cut_ends_the_answer(lone: LoneGateway, pool: ScriptedPool) -> None:
    put_route(lone, words="secret", action="cut")
    answer(lone, pool, "this is a secret that goes on")
    texts, finish = await streamed(lone)
    assert "".join(texts) == "this is a "
    assert finish == pb.FINISH_REASON_CONTENT_FILTER


async def test_other_ways_out_are_closed(lone: LoneGateway, pool: ScriptedPool) -> None:
    put_route(lone, words="secret")
    for fields in ({"return_token_ids": True}, {"logprobs": 2}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streamed(lone, **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Failing:
    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def feed(self, text: str) -> Filtered:
        if "!" in text:
            if not self._wait_s:
                raise ValueError("no exclamations")
            time.sleep(self._wait_s)
        return Filtered("", held=0) if text == "-" else Filtered(text)

    def finish(self) -> Filtered:
        return Filtered("")


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
async def test_its_failure_is_open_or_closed(
    lone: LoneGateway, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setitem(response_filter.BUILT_IN, "failing", lambda options: lambda: Failing(wait_s))
    answer(lone, pool, "ab!cd")
    put_route(lone, "failing", "open")
    assert "".join((await streamed(lone))[0]) == "ab!cd"
    put_route(lone, "failing", "closed")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await streamed(lone)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    put_route(lone, "nobody", "closed")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await streamed(lone)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    put_route(lone, "nobody", "open")
    assert "".join((await streamed(lone))[0]) == "ab!cd"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_nothing_of_a_word_leaves_before_it_is_known(size: int) -> None:
    text, held = "xxab abc abcd ab", word_filter({"words": "abcd,bc"})()
    said = ""
    for start in range(0, len(text), size):
        found = held.feed(text[start : start + size])
        said += found.text
        assert len(said) <= start + size
    assert said + held.finish().text == "xxab a*** *** ab"
