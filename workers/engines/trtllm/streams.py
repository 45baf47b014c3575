"""The requests in flight in one model: what each got, gathered into one frame for each iteration of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from workers.engines.trtllm.messages import Generate, Output, Tokens
from workers.engines.trtllm.model import Model

log = logging.getLogger(__name__)


class Streams:
    """Everything here runs on the server's loop."""

    def __init__(self, send: Callable[[Tokens], None], lost: Callable[[str], None]) -> None:
        """`lost` is called with the reason when an error was not of one request but of the engine itself."""
        self._send = send
        self._lost = lost
        self._following: dict[int, tuple[asyncio.Task[None], Any]] = {}  # by sequence: its task, the library's output
        self._ready: list[Output] = []
        self._flush_is_due = False
        self.iteration = 0

    @property
    def in_flight(self) -> int:
        return len(self._following)

    def start(self, model: Model, request: Generate) -> None:
        try:
            output = model.generate(request)
        except Exception as error:  # noqa: BLE001 - the library's; said to who asked
            self._fail(request.sequence, error)
            return
        task = asyncio.get_running_loop().create_task(self._follow(request, output), name=f"request-{request.sequence}")
        self._following[request.sequence] = (task, output)

    def cancel(self, model: Model, sequences: list[int]) -> list[asyncio.Task[None]]:
        """Those that have ended already are none of it."""
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(model.abort(self._following[sequence][1])) for sequence in sequences if sequence in self._following
        ]

    def cancel_all(self, model: Model) -> list[asyncio.Task[None]]:
        return self.cancel(model, list(self._following))

    async def _follow(self, request: Generate, output: Any) -> None:
        seen = 0
        try:
            async for state in output:
                answer = state.outputs[0]
                # The answer so far; a stop word may be cut off its end again, which the driver knows by itself.
                tokens = [int(token) for token in answer.token_ids[seen:]]
                logprobs, alternatives = _logprobs(answer, seen, tokens) if request.logprobs >= 0 else ([], [])
                seen += len(tokens)
                if tokens or answer.finish_reason:
                    self._put(Output(request.sequence, tokens, logprobs, answer.finish_reason or "", "", alternatives))
                if answer.finish_reason:
                    return
            self._put(Output(request.sequence, [], finish="cancelled"))
        except Exception as error:  # noqa: BLE001 - whatever ended the request in the library
            self._fail(request.sequence, error)
        finally:
            self._following.pop(request.sequence, None)

    def _fail(self, sequence: int, error: Exception) -> None:
        text = str(error) or type(error).__name__
        log.warning("request %d: %r", sequence, error)
        if _of_one_request(error):
            self._put(Output(sequence, [], finish="error", error=text))
        else:
            self._lost(text)  # and with it every request, which the driver tells

    def _put(self, output: Output) -> None:
        """Who else gets something in this iteration is scheduled already, and runs before a callback of the turn after next."""
        self._ready.append(output)
        if not self._flush_is_due:
            self._flush_is_due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        self.iteration += 1
        outputs, self._ready = self._ready, []
        self._send(Tokens(self.iteration, outputs))


def _of_one_request(error: Exception) -> bool:
    """The library raises RequestError, or complains of an argument; anything else says that its executor is gone."""
    return isinstance(error, ValueError | TypeError) or any(kind.__name__ == "RequestError" for kind in type(error).__mro__)


def _logprobs(answer: Any, seen: int, tokens: list[int]) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Of each token, and of the likeliest at its place. The library gives floats, or a dictionary for each token."""
    chosen: list[float] = []
    likeliest: list[list[tuple[int, float]]] = []
    for token, item in zip(tokens, (answer.logprobs or [])[seen:], strict=False):
        if not isinstance(item, dict):
            chosen.append(float(item))
            likeliest.append([])
            continue
        known = {int(other): float(getattr(entry, "logprob", entry)) for other, entry in item.items()}
        chosen.append(known.get(token, 0.0))
        likeliest.append(sorted(known.items(), key=lambda pair: -pair[1]))
    return chosen, likeliest
