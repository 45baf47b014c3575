"""modelyard.v1.Inference against a pool that does what the test says."""

from __future__ import annotations

from pathlib import Path

from house import House, ids_of
from scripted_pool import ScriptedPool

from gateway.api.proto.inference_pb2 import FinishReason, GenerateRequest

ANSWER = " Paris. naïve 😀"


async def test_a_whole_answer(house: House, pool: ScriptedPool, byte_level: Path) -> None:
    ids = ids_of(byte_level, ANSWER)
    pool.script = lambda sequence: sequence.end("length", tokens=ids, completion_tokens=len(ids), cached_tokens=2)
    request = GenerateRequest(model="m", prompt="The capital of France is", max_tokens=64, request_id="mine")
    response = await house.inference.Generate(request, timeout=10)
    assert response.choices[0].text == ANSWER
    assert response.choices[0].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert (response.model, response.request_id) == ("m", "mine")
    assert response.usage.prompt_tokens == len(ids_of(byte_level, "The capital of France is"))
    assert response.usage.completion_tokens == len(ids)
    assert response.usage.cached_tokens == 2
