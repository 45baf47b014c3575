"""What is left of a request when it has ended: a span and a line in the log. Costs nothing while neither is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from gateway.api import tracing
from gateway.servers.request import GenerationRequest

log = logging.getLogger("gateway.requests")


class RequestRecord:
    """Begins with the request, whose `traceparent` then names this span, so that the driver's lies below it."""

    __slots__ = ("_began", "_request", "_span")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._began = time.monotonic()
        self._span: Any = None
        if not request.shadow:
            operation = "embeddings" if request.embed else "chat" if request.messages is not None else "text_completion"
            attributes: dict[str, tracing.Attribute] = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "modelyard",
                "gen_ai.request.model": request.model,
                "gen_ai.request.choice.count": request.n,
                "modelyard.request.id": request.request_id,
            }
            if request.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = request.max_tokens
            self._span = tracing.begin(f"{operation} {request.model}", request.traceparent, attributes, server=True)
            if self._span is not None:
                request.traceparent = tracing.traceparent_of(self._span)

    def first_token(self) -> None:
        if self._span is not None:
            self._span.add_event("first token")

    def end(self, *, model: str, tenant: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int, error: str) -> None:
        """`error` is empty for answers that came whole."""
        if self._span is not None:
            usage: dict[str, tracing.Attribute] = {
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            }
            tracing.end(self._span, usage, error)
            self._span = None
        if log.isEnabledFor(logging.INFO) and not self._request.shadow:
            fields = {
                "request_id": self._request.request_id,
                "trace": self._request.traceparent,
                "route": self._request.model[:128],
                "model": model,
                "tenant": tenant,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "cached_tokens": cached_tokens,
                "seconds": round(time.monotonic() - self._began, 4),
                "code": error or "ok",
            }
            # In the loop's next turn: who asked need not wait for the line.
            asyncio.get_running_loop().call_soon(partial(log.info, "request %s", error or "ok", extra=fields))
