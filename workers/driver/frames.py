"""One gateway's stream, downwards: what its requests got since the last frame was taken."""

from __future__ import annotations

import asyncio

from gateway.api.proto import pool_pb2
from workers.driver.effects import Ended
from workers.messages import SampledToken


class Outbox:
    """Collects until `next_frame` takes it: one frame a step while the gateway keeps up, larger and fewer when it does not.

    What is collected is bounded by what its requests may generate.
    """

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self._frame = pool_pb2.DownFrame()
        self._tokens: dict[int, pool_pb2.Tokens] = {}
        self._dirty = False
        self._closed = False
        self._ready = asyncio.Event()
        self._loads: tuple[tuple[str, int, int, int], ...] = ()
        self._step = -1

    def token(self, request: int, token: SampledToken, *, logprobs: bool) -> None:
        tokens = self._tokens.get(request)
        if tokens is None:
            tokens = self._tokens[request] = self._frame.tokens.add(id=request)
        tokens.ids.append(token.token)
        if token.embedding:
            tokens.embedding = token.embedding
        if logprobs:
            tokens.logprobs.add(
                logprob=token.logprob,
                alternative_ids=token.alternative_ids,
                alternative_logprobs=token.alternative_logprobs,
            )
        self._dirty = True

    def end(self, request: int, ended: Ended) -> None:
        self._frame.ends.add(
            id=request,
            finish_reason=ended.finish_reason,
            stop_token_id=ended.stop_token_id,
            error_code=ended.error_code or "",
            error_message=ended.error_message,
            retry_after_ms=int(ended.retry_after_s * 1000),
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            cached_tokens=ended.cached_tokens,
            error_field=ended.error_field,
        )
        self._dirty = True

    def hold(self, request: int, reason: str, wait_s: float) -> None:
        self._frame.holds.add(id=request, reason=reason, estimated_wait_ms=int(wait_s * 1000))
        self._dirty = True

    def flush(self, step: int, loads: tuple[tuple[str, int, int, int], ...], *, alone: bool = False, alive: bool = False) -> None:
        """Let the frame go, with the number of steps done and the loads (model, outstanding tokens, running, waiting).

        `alone`: also when these are all that is new: a gateway must see that a long prompt goes on (rule 11). `alive`: also when
        nothing is new, so that silence says that this process is gone.
        """
        if not (self._dirty or alive or (alone and (step, loads) != (self._step, self._loads))):
            return
        self._step = step
        self._frame.step = step
        del self._frame.loads[:]
        for model, outstanding, running, waiting in loads:
            self._frame.loads.add(model=model, outstanding_tokens=outstanding, running=running, waiting=waiting)
        self._loads = loads
        self._dirty = False
        self._ready.set()

    def close(self) -> None:
        """No more frames are taken."""
        self._closed = True
        self._ready.set()

    async def next_frame(self) -> pool_pb2.DownFrame | None:
        """None when the stream is closed."""
        await self._ready.wait()
        if self._closed:
            return None
        self._ready.clear()
        frame, self._frame, self._tokens = self._frame, pool_pb2.DownFrame(), {}
        return frame
