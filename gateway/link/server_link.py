"""Requests of one gateway to one server that already runs elsewhere: asked, looked after, and not managed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.api.proto.pool_pb2 import End, Submit
from gateway.api.records import GroupRecord, ModelState
from gateway.api.tasks import cancelled
from gateway.link.flight import Flight, Lost, Text
from gateway.link.server import Facts, Server, Unreachable
from gateway.link.words import Words

log = logging.getLogger(__name__)

LOOK_S = 2.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
PROBE_TIMEOUT_S = 20.0
"""For one token of a server that was silent."""
STOP_S = 0.2
"""A server that was given the same stop strings ends by itself, and says what the answer took."""
NOT_LOOKED = "it has not been looked at yet"
PROBE = Words(prompt="Hello", sampling={"temperature": 0.0})


@dataclass(slots=True, eq=False)
class _Sequence:
    flight: Flight
    index: int
    cost: int
    task: asyncio.Task[None] | None = None
    tokens: int = 0
    stopping: asyncio.TimerHandle | None = None

    def end(self) -> None:
        if self.stopping is not None:
            self.stopping.cancel()
        if self.task is not None:
            self.task.cancel()


class ServerLoad:
    """What this gateway has there. Of what others have there nothing is known, nor of what waits in it."""

    def __init__(self, sequences: dict[int, _Sequence]) -> None:
        self._sequences = sequences

    def sequences(self, model: str) -> int:
        return len(self._sequences)

    def waiting(self, model: str) -> int:
        return 0

    def tokens(self) -> int:
        return sum(max(0, sequence.cost - sequence.tokens) for sequence in self._sequences.values())


class ServerLink:
    """Carries this gateway's requests for one model to the server that has it. Each sequence is a request of its own there.

    - Every LOOK_S the server is looked at. A look that fails takes it out of the rotation, unless an answer came on
      meanwhile; the next one that succeeds brings it back. Who finds nobody listening says so at once.
    - Health is forward progress (rule 11): with sequences in flight and nothing heard of any for `server.silent_s`, it is stuck.
      What is in flight ends, and it is asked for one token until it gives one.
    - `retire` lets what is in flight finish and takes nothing new.

    All methods belong to the loop that made it.
    """

    def __init__(self, model: str, spec: ModelSpec, generation: int, server: Server, *, on_change: Callable[[], None]) -> None:
        self.pool = model  # what the choice of a replica remembers
        self.spec = spec
        self.generation = generation
        self.up = False
        self.retired = False
        self.reason = NOT_LOOKED
        self.updates = 0  # looks that were taken
        self._server = server
        self._on_change = on_change
        self._facts = Facts()
        self._sequences: dict[int, _Sequence] = {}
        self.load = ServerLoad(self._sequences)
        self._next_id = 1
        self._stuck = False
        self._heard_s = 0.0
        self._since_unix = 0.0
        self._look_now = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._keep_looking(), name=f"server-{model}")

    # ---------------------------------------------------------------- what the choice of a replica looks at

    def ready_groups(self, model: str) -> int:
        return int(self.up and not self.retired and model == self.pool)

    def outstanding_tokens(self, model: str) -> int:
        return self.load.tokens()

    @property
    def in_flight(self) -> int:
        return len(self._sequences)

    @property
    def is_stuck(self) -> bool:
        """From when nothing was heard for `server.silent_s`, with something in flight, until something is."""
        if not self._stuck and self._sequences:
            silent_s = self._now() - self._heard_s
            if silent_s > self.spec.server.silent_s:
                self._stuck = True
                self.reason = f"nothing was heard for {silent_s:.0f} s with {len(self._sequences)} requests in flight"
                log.warning("the server of model %s leaves the rotation: %s", self.pool, self.reason)
                self._lose(self.reason)
                self._look_now.set()
                self._on_change()
        return self._stuck

    def asks_as(self, spec: ModelSpec) -> bool:
        """Whether it goes on as it is with this specification."""
        return all(getattr(self.spec, name) == getattr(spec, name) for name in ("source", "server", "tokenizer"))

    def update(self, spec: ModelSpec, generation: int) -> None:
        self.spec, self.generation = spec, generation

    def record(self) -> GroupRecord:
        """Its state, as the site shows it."""
        state: ModelState = "ready" if self.up and not self._stuck else "waiting" if self.reason == NOT_LOOKED else "failed"
        return GroupRecord(
            model=self.pool,
            generation=self.generation,
            group=0,
            ranks=(),
            tensor_parallel=0,
            pipeline_parallel=0,
            state=state,
            reason="" if state == "ready" else self.reason,
            engine="elsewhere",
            context=self._facts.context,
            running=len(self._sequences),
            outstanding_tokens=self.load.tokens(),
            ready_since_unix=self._since_unix,
        )

    # ---------------------------------------------------------------- requests

    def submit(self, flight: Flight, submits: Sequence[Submit]) -> list[int]:
        """As `PoolLink.submit`. YardError(UNAVAILABLE) when the server is not there."""
        if not self.up or self.retired:
            raise unavailable(f"the server of model `{self.pool}` is not there: {self.reason}")
        if not self._sequences:
            self._heard_s = self._now()
        ids = []
        for index, submit in enumerate(submits):
            sequence, self._next_id = self._next_id, self._next_id + 1
            asked = _Sequence(flight, index, len(submit.prompt_ids) + submit.max_tokens)
            self._sequences[sequence] = asked
            asked.task = asyncio.create_task(self._ask(sequence, asked, submit), name=f"server-{self.pool}-{sequence}")
            self._ending.add(asked.task)
            asked.task.add_done_callback(self._ending.discard)
            ids.append(sequence)
        return ids

    def cancel(self, ids: Sequence[int]) -> None:
        """Ends those of these requests that still run. Their flight hears nothing more of them."""
        for sequence in ids:
            if (asked := self._sequences.pop(sequence, None)) is not None:
                asked.end()
        self._close_when_idle()

    def stop(self, sequence: int) -> None:
        """Ends a request whose end is still to be heard; its server has STOP_S to say it."""
        asked = self._sequences.get(sequence)
        if asked is not None and asked.stopping is None:
            asked.stopping = asyncio.get_running_loop().call_later(STOP_S, self._cut, sequence)

    def _cut(self, sequence: int) -> None:
        asked = self._sequences.pop(sequence, None)
        if asked is not None:
            asked.end()
            asked.flight.push(asked.index, End(finish_reason="cancelled", stop_token_id=-1, completion_tokens=asked.tokens))
            self._close_when_idle()

    async def _ask(self, sequence: int, asked: _Sequence, submit: Submit) -> None:
        try:
            async with aclosing(self._server.answer(submit, asked.flight.words)) as answer:
                async for event in answer:
                    self._hear()
                    if isinstance(event, End):
                        self._end(sequence, event)
                        return
                    tokens = event.tokens if isinstance(event, Text) else len(event.ids)
                    if tokens or (isinstance(event, Text) and event.stop_reason):
                        asked.tokens += tokens
                        asked.flight.push(asked.index, event)
            raise unavailable(f"the server of model `{self.pool}` broke its answer off", 1.0)
        except YardError as error:
            self._doubt(error)
            self._end(sequence, _error_end(error))
        except Exception as error:
            log.exception("a request to the server of model %s failed", self.pool)
            problem = f"what the server of model `{self.pool}` sent cannot be read: {type(error).__name__}: {error}"
            self._end(sequence, _error_end(YardError(ErrorCode.INTERNAL, problem)))

    def _end(self, sequence: int, end: End) -> None:
        asked = self._sequences.pop(sequence, None)
        if asked is not None:
            if asked.stopping is not None:
                asked.stopping.cancel()
            asked.flight.push(asked.index, end)
            self._close_when_idle()

    def _hear(self) -> None:
        self._heard_s = self._now()
        if self._stuck:
            self._come_back()

    def _doubt(self, error: YardError) -> None:
        """A request says first that the server is gone; the next look says whether it is."""
        if isinstance(error, Unreachable):
            self._leave(error.message)
        if error.code is ErrorCode.UNAVAILABLE:
            self._look_now.set()

    # ---------------------------------------------------------------- life

    def retire(self, reason: str) -> None:
        self.retired = True
        self.reason = reason
        self._close_when_idle()

    async def close(self, reason: str) -> None:
        """Ends what is in flight; it is lost."""
        self.retired = True
        self.reason = reason
        self._lose(reason)
        await cancelled([*self._ending, self._task])
        await self._server.close()

    @property
    def closed(self) -> bool:
        return self._task.done()

    def _close_when_idle(self) -> None:
        if self.retired and not self._sequences:
            self._look_now.set()

    def _lose(self, reason: str) -> None:
        sequences, flights = list(self._sequences.values()), {asked.flight for asked in self._sequences.values()}
        self._sequences.clear()
        for asked in sequences:
            asked.end()
        for flight in flights:
            flight.push(-1, Lost(f"the server of model `{self.pool}`: {reason}"))

    async def _keep_looking(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not (self.retired and not self._sequences):
            self._look_now.clear()
            began_s = self._now()
            try:
                self._facts = await self._probe() if self._stuck else await self._server.look()
                self._come_back()
            except YardError as error:
                if self._heard_s < began_s or not self._sequences:
                    self._leave(error.message)
            except Exception as error:
                # A server may say anything; nothing of it may end the looking.
                log.exception("a look at the server of model %s failed", self.pool)
                self._leave(f"what it says of itself cannot be read: {type(error).__name__}: {error}")
            self.updates += 1
            self._on_change()
            pause_s, backoff_s = (LOOK_S, FIRST_BACKOFF_S) if self.up else (backoff_s, min(LONGEST_BACKOFF_S, backoff_s * 2))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._look_now.wait()
        await cancelled(self._ending)
        await self._server.close()

    async def _probe(self) -> Facts:
        """Asks for one token. YardError when none comes."""
        submit = Submit(prompt_ids=() if self.spec.answers_in_text else (0,), max_tokens=1)
        submit.sampling.top_p = submit.sampling.repetition_penalty = 1.0
        submit.sampling.logprobs = -1
        submit.request_id = "probe"
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), aclosing(self._server.answer(submit, PROBE)) as answer:
                async for _ in answer:
                    return self._facts
        except TimeoutError as error:
            raise unavailable(f"it gave no token within {PROBE_TIMEOUT_S:.0f} s") from error
        raise unavailable("it answered nothing when it was asked for a token")

    def _come_back(self) -> None:
        if self.up and not self._stuck:
            return
        self.up, self._stuck, self.reason = True, False, ""
        self._since_unix = time.time()
        log.info("the server of model %s is in the rotation", self.pool)
        self._on_change()

    def _leave(self, reason: str) -> None:
        if self.up:
            log.warning("the server of model %s leaves the rotation: %s", self.pool, reason)
        changed, self.up, self.reason = self.up or reason != self.reason, False, reason
        if changed:
            self._on_change()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _error_end(error: YardError) -> End:
    end = End(finish_reason="error", stop_token_id=-1, error_code=error.code.value, error_message=error.message)
    end.retry_after_ms = int((error.retry_after_s or 0.0) * 1000)
    return end
