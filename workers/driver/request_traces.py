"""Spans of the requests in a pool, below those of their gateways: waiting and prefill up to the first token, then decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api import tracing
from workers.driver.effects import Ended, RequestKey
from workers.driver.sequence import Request


@dataclass(slots=True)
class _Traced:
    span: Any
    model: str
    phase: Any
    tokens: int = 0


class RequestTraces:
    """Empty while traces are off."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._open: dict[RequestKey, _Traced] = {}

    def begin(self, request: Request) -> None:
        attributes: dict[str, tracing.Attribute] = {
            "modelyard.pool": self._pool,
            "modelyard.request.id": request.request_id,
            "gen_ai.response.model": request.model,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        span = tracing.begin(f"pool {self._pool}", request.traceparent, attributes)
        if span is not None:
            self._open[request.key] = _Traced(span, request.model, tracing.begin("prefill steps", tracing.traceparent_of(span)))

    def held(self, key: RequestKey, reason: str) -> None:
        if traced := self._open.get(key):
            traced.span.add_event("held", {"reason": reason})

    def token(self, key: RequestKey) -> None:
        if not self._open or (traced := self._open.get(key)) is None:
            return
        traced.tokens += 1
        if traced.tokens == 1:
            traced.phase.end()
            traced.phase = tracing.begin("decode steps", tracing.traceparent_of(traced.span))

    def end(self, key: RequestKey, ended: Ended) -> None:
        if not self._open or (traced := self._open.pop(key, None)) is None:
            return
        if traced.phase is not None:
            traced.phase.set_attribute("modelyard.tokens", traced.tokens)
            traced.phase.end()
        attributes: dict[str, tracing.Attribute] = {
            "gen_ai.response.finish_reasons": ended.finish_reason,
            "gen_ai.usage.output_tokens": ended.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        }
        tracing.end(traced.span, attributes, ended.error_code.value if ended.error_code else "")
