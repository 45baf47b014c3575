"""What is left of a request: spans from the gateway's to the driver's, and a line of JSON with its id."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lone_gateway import LoneGateway, ids_of
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_pool import ScriptedPool

from gateway.api import logs, tracing
from workers.driver.effects import Ended
from workers.driver.request_traces import RequestTraces
from workers.driver.wire import request_of

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.use(SimpleSpanProcessor(exporter), "test")
    yield exporter
    tracing.stop()


async def ask(lone: LoneGateway, model: str = "m", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{lone.http}/v1/completions", json={"model": model, "prompt": "hello"}, headers=headers)


async def test_one_trace_from_the_client_to_the_steps(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, spans: InMemorySpanExporter
) -> None:
    ids = ids_of(byte_level, "yes indeed")
    traces = RequestTraces("a")

    def script(sequence) -> None:
        request = request_of(1, sequence.submit, 0.0)
        traces.begin(request)
        traces.held(request.key, "model `m` is waking")
        for _ in ids:
            traces.token(request.key)
        traces.end(request.key, Ended("length", prompt_tokens=1, completion_tokens=len(ids)))
        sequence.end("length", tokens=ids)

    pool.script = script
    assert (await ask(lone, traceparent=CLIENT)).status_code == 200
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"text_completion m", "pool a", "prefill steps", "decode steps"}
    request, below = found["text_completion m"], found["pool a"]
    assert f"{request.context.trace_id:032x}" == CLIENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert below.parent.span_id == request.context.span_id
    assert {found[name].parent.span_id for name in ("prefill steps", "decode steps")} == {below.context.span_id}
    assert request.attributes["gen_ai.operation.name"] == "text_completion"
    assert request.attributes["gen_ai.usage.output_tokens"] == len(ids)
    assert below.attributes["modelyard.request.id"] == request.attributes["modelyard.request.id"]
    assert [event.name for event in below.events] == ["held"]
    assert request.status.is_ok or request.status.is_unset


async def test_a_failed_request_says_so(lone: LoneGateway, pool: ScriptedPool, spans: InMemorySpanExporter) -> None:
    pool.script = lambda sequence: sequence.fail("invalid", "no")
    await ask(lone)
    await ask(lone, model="nope")
    errors = [span.attributes["error.type"] for span in spans.get_finished_spans()]
    assert errors == ["invalid", "not_found"]


async def test_off_is_off(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    tracing.start("test", {})
    assert tracing.begin("x", CLIENT) is None
    seen = []

    def script(sequence) -> None:
        seen.append(sequence.submit.traceparent)
        sequence.end("length", tokens=ids_of(byte_level, "yes"))

    pool.script = script
    await ask(lone, traceparent=CLIENT)
    assert seen == [CLIENT], "the client's own context travels on"


async def test_a_line_of_json_for_each_request(lone: LoneGateway, pool: ScriptedPool, byte_level: Path, tmp_path: Path) -> None:
    """Rule 15: no prompt, no answer and no key in it."""
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "indeed"))
    file = logs.install(tmp_path, "gateway-0")
    try:
        await ask(lone, **{"x-request-id": "mine", "authorization": "Bearer hidden-key"})
        logging.getLogger("gateway.other").warning("odd %s", "thing", extra={"request_id": "another", "what": Path("/x")})
    finally:
        for name in ("gateway", "workers"):
            logger = logging.getLogger(name)
            logger.handlers = [handler for handler in logger.handlers if not isinstance(handler.formatter, logs.JsonFormatter)]
            logger.setLevel(logging.NOTSET)
    text = file.read_text()
    request, other = [
        line for line in map(json.loads, text.splitlines()) if line["logger"] in ("gateway.requests", "gateway.other")
    ]
    assert (request["request_id"], request["model"], request["code"], request["process"]) == ("mine", "m", "ok", "gateway-0")
    assert request["completion_tokens"] == len(ids_of(byte_level, "indeed"))
    assert (other["message"], other["request_id"], other["what"]) == ("odd thing", "another", "/x")
    assert "hidden-key" not in text
    assert "hello" not in text
