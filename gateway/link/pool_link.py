"""One stream to one pool driver, kept open."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

import grpc

from gateway.api.errors import unavailable
from gateway.api.pool_channel import pool_channel
from gateway.api.proto.pool_pb2 import DownFrame, Submit, UpFrame
from gateway.api.proto.pool_pb2_grpc import PoolLinkStub
from gateway.api.records import PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY
from gateway.api.tasks import cancelled
from gateway.link.flight import Flight, Lost
from gateway.link.pool_load import PoolLoad

log = logging.getLogger(__name__)

STUCK_S = 20.0
"""Requests in flight, not all of them held, and nothing computed for so long: the replica is stuck. One step on a loaded CPU may
take seconds."""
SILENT_S = 8.0
"""Nothing came from a driver whose heartbeat expired, though drivers say each second that they are there: it is dead. More
than HEARTBEAT_TTL_S, so that one late heartbeat ends nothing."""
PROBE_S = 5.0
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0

LinkCall = grpc.aio.StreamStreamCall[UpFrame, DownFrame]


class PoolLink:
    """Carries the requests of this gateway to one incarnation of one pool driver.

    - `up` from when the stream's first frame was accepted until it breaks. `submit` needs it.
    - When the stream breaks, every flight on it gets Lost at once, and the link connects again with growing pauses.
    - `retire` ends that: a retired link takes no new requests, keeps what is in flight, and closes when the last ended or
      the stream breaks.
    - Health is forward progress (rule 11): see `is_stuck`. A link that was stuck is asked for one token each PROBE_S, and is in
      the rotation again when anything at all is computed.
    - A retired link on whose stream nothing comes is one to a dead process: see `is_silent`.
    - Submits and cancels that come up while a frame is being written leave together in the next one.

    All methods belong to the loop that made it.
    """

    def __init__(
        self,
        record: PoolRecord,
        *,
        gateway: str,
        secret: str,
        on_change: Callable[[], None],
        on_load: Callable[[str], None] = lambda model: None,
    ) -> None:
        self.pool = record.pool
        self.endpoint = record.endpoint
        self.incarnation = record.incarnation
        self.up = False
        self.retired = False
        self.reason = "not connected yet"
        self._gateway = gateway
        self._secret = secret
        self._on_change = on_change
        self._on_load = on_load
        self.updates = 0  # heartbeats taken over
        self._states: dict[str, Counter[str]] = {}
        self._ranks_alive = True
        self.load = PoolLoad()
        self._flights: dict[int, tuple[Flight, int]] = {}
        self._held: set[int] = set()  # of the flights, those whose model is being brought in
        self._progress_s = 0.0
        self._steps = 0  # that the pool has done, as its last frame said
        self._heard_s = asyncio.get_running_loop().time()  # when the last frame came
        self._stuck = False
        self._probe: asyncio.Task[None] | None = None
        self._next_id = 1
        self._outbox = UpFrame()
        self._outbox_ready = asyncio.Event()
        self.update(record)
        self._task = asyncio.create_task(self._run(), name=f"link-{self.pool}")

    # ---------------------------------------------------------------- what the choice of a replica looks at

    def update(self, record: PoolRecord) -> None:
        """Takes over a newer heartbeat of the same incarnation."""
        self.updates += 1
        states: dict[str, Counter[str]] = {}
        for group in record.groups:
            states.setdefault(group.model, Counter())[group.state] += 1
        self._states = states
        self._ranks_alive = all(rank.alive for rank in record.ranks)
        if not self.up or not self._flights:
            self.load.observe(record)

    def groups(self, model: str, state: str) -> int:
        counter = self._states.get(model)
        return counter[state] if counter else 0

    def ready_groups(self, model: str) -> int:
        return self.groups(model, "ready")

    def coming_groups(self, model: str) -> int:
        """None while its ranks are down: nobody knows when they are back."""
        if not self._ranks_alive:
            return 0
        return sum(self.groups(model, state) for state in ("waiting", "loading", "checking"))

    @property
    def held_models(self) -> list[str]:
        """Those with a group that is ready or parked."""
        return [model for model, states in self._states.items() if states["ready"] or states["parked"]]

    def outstanding_tokens(self, model: str) -> int:
        return self.load.outstanding_tokens(model)

    @property
    def is_stuck(self) -> bool:
        """Out of the rotation: there are requests in flight that should compute, and the pool has ended no step for STUCK_S,
        for whomever; from then on until something was computed."""
        if not self._stuck and len(self._flights) > len(self._held):
            silent_s = asyncio.get_running_loop().time() - self._progress_s
            if silent_s > STUCK_S:
                self._stuck = True
                self.reason = f"no step for {silent_s:.0f} s with {len(self._flights)} requests in flight"
                log.warning("pool %s leaves the rotation: %s", self.pool, self.reason)
                self._let_go_of_flights()
                self._probe = asyncio.create_task(self._ask_for_progress(), name=f"link-{self.pool}-probe")
                self._on_change()
        return self._stuck

    def _let_go_of_flights(self) -> None:
        """Requests of which nothing was heard yet may be answered elsewhere, the others end (rule 9); none waits for a pool that
        may never go on. Those whose model is being brought in stay."""
        held = {self._flights[sequence][0] for sequence in self._held if sequence in self._flights}
        lost = {flight for flight, _ in self._flights.values()} - held
        self.cancel([sequence for sequence, (flight, _) in self._flights.items() if flight in lost])
        for flight in lost:
            flight.push(-1, Lost(f"the replica was lost: pool `{self.pool}`: {self.reason}"))

    @property
    def is_silent(self) -> bool:
        """Its driver's heartbeat has expired, and nothing has come over the stream for SILENT_S either: the process is frozen, or
        its node is gone, and the connection does not say so yet."""
        return self.retired and asyncio.get_running_loop().time() - self._heard_s > SILENT_S

    def abandon(self) -> None:
        """Ends the stream without waiting for the other side; what is in flight is lost."""
        self._lose(f"{self.reason}, and nothing was heard for {asyncio.get_running_loop().time() - self._heard_s:.0f} s")
        self._task.cancel()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # ---------------------------------------------------------------- requests

    def submit(self, flight: Flight, submits: Sequence[Submit]) -> list[int]:
        """Sends the sequences of one request; `flight` hears of each by its place in `submits`. Returns their ids.

        YardError(UNAVAILABLE) when the link is not up: nothing was sent then.
        """
        if not self.up or self.retired:
            raise unavailable(f"pool `{self.pool}` is not connected: {self.reason}")
        ids = []
        if not self._flights:
            self._progress_s = asyncio.get_running_loop().time()
        for index, submit in enumerate(submits):
            submit.id = self._next_id
            self._next_id += 1
            self._flights[submit.id] = (flight, index)
            self.load.sent(submit)
            ids.append(submit.id)
        self._outbox.submits.extend(submits)
        self._outbox_ready.set()
        return ids

    def cancel(self, ids: Sequence[int]) -> None:
        """Stops those of these sequences that still run. Their flight hears nothing more of them."""
        running = [sequence for sequence in ids if self._flights.pop(sequence, None) is not None]
        self._held.difference_update(running)
        if running and self.up:
            self._outbox.cancels.extend(running)
            self._outbox_ready.set()
        self._close_when_idle()

    def stop(self, sequence: int) -> None:
        """Stops a sequence whose end is still to be heard: it says what the sequence took."""
        if sequence in self._flights and self.up:
            self._outbox.cancels.append(sequence)
            self._outbox_ready.set()

    # ---------------------------------------------------------------- life

    def retire(self, reason: str) -> None:
        self.retired = True
        self.reason = reason
        if not self.up:
            self._task.cancel()
        self._close_when_idle()

    async def close(self, reason: str) -> None:
        """Ends the stream now; what is in flight is lost."""
        self.retired = True
        self.reason = reason
        self._end_flights(reason)
        await cancelled([self._task, self._probe])

    @property
    def closed(self) -> bool:
        return self._task.done()

    def _close_when_idle(self) -> None:
        # Up frames that wait carry the last cancels; the writer looks again when they are out.
        if self.retired and not self._flights and not self._outbox_ready.is_set():
            self._task.cancel()

    async def _run(self) -> None:
        pause_s = FIRST_BACKOFF_S
        try:
            while not self.retired:
                began = asyncio.get_running_loop().time()
                await self._connect_once()
                if self.retired:
                    return
                # A stream that broke at once, as with a wrong secret, is no reason to hurry.
                lasted_s = asyncio.get_running_loop().time() - began
                pause_s = FIRST_BACKOFF_S if lasted_s > LONGEST_BACKOFF_S else min(LONGEST_BACKOFF_S, pause_s * 2)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        finally:
            self._lose(self.reason)

    async def _connect_once(self) -> None:
        """Serves one stream until it ends."""
        metadata = ((SECRET_METADATA_KEY, self._secret),)
        async with pool_channel(self.endpoint, self._secret) as channel:
            call: LinkCall = PoolLinkStub(channel).Link(metadata=metadata)
            writer: asyncio.Task[None] | None = None
            try:
                await call.write(UpFrame(gateway=self._gateway))
                self.up = True
                self._outbox = UpFrame()
                self._outbox_ready.clear()
                log.info("link to pool %s at %s is up", self.pool, self.endpoint)
                self._on_change()
                writer = asyncio.create_task(self._write(call), name=f"link-{self.pool}-writer")
                await self._read(call)
                self._lose(f"pool `{self.pool}` closed the link")
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                self._lose(f"pool `{self.pool}` at {self.endpoint}: {_describe(error)}")
            finally:
                await cancelled([writer])
                call.cancel()

    async def _read(self, call: LinkCall) -> None:
        flights = self._flights
        async for frame in call:
            self._heard_s = asyncio.get_running_loop().time()
            # Also steps that gave no token yet, as those of a long prompt. Ends of what was cancelled say nothing of computing.
            if frame.tokens or frame.step > self._steps or any(end.finish_reason in ("stop", "length") for end in frame.ends):
                self._progress()
            self._steps = frame.step
            for tokens in frame.tokens:
                if self._held:
                    self._held.discard(tokens.id)
                if (entry := flights.get(tokens.id)) is not None:
                    entry[0].push(entry[1], tokens)
            for hold in frame.holds:
                if (entry := flights.get(hold.id)) is not None:
                    self._held.add(hold.id)
                    entry[0].push(entry[1], hold)
            for end in frame.ends:
                self._held.discard(end.id)
                if (entry := flights.pop(end.id, None)) is not None:
                    entry[0].push(entry[1], end)
            for load in frame.loads:
                self.load.told(load)
                self._on_load(load.model)
            if frame.ends:
                self._close_when_idle()

    async def _write(self, call: LinkCall) -> None:
        try:
            while True:
                await self._outbox_ready.wait()
                frame, self._outbox = self._outbox, UpFrame()
                self._outbox_ready.clear()
                await call.write(frame)
                self._close_when_idle()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader sees the same end and tells the flights.
            log.debug("link to pool %s: write failed: %s", self.pool, _describe(error))

    def _progress(self) -> None:
        self._progress_s = asyncio.get_running_loop().time()
        if self._stuck:
            self._stuck = False
            log.info("pool %s is back in the rotation", self.pool)
            if self._probe is not None:
                self._probe.cancel()
                self._probe = None
            self._on_change()

    async def _ask_for_progress(self) -> None:
        """Until it is cancelled: asks for one token of each ready model, of which one is enough."""
        while self.up and not self.retired:
            models = [model for model, states in self._states.items() if states["ready"]]
            probes = [Submit(model=model, prompt_ids=[0], max_tokens=1, ignore_eos=True, shadow=True) for model in models]
            for probe in probes:
                probe.request_id = f"probe of {self._gateway}"
                probe.sampling.top_p = probe.sampling.repetition_penalty = 1.0
                probe.sampling.logprobs = -1
            ids = self.submit(Flight(), probes)
            try:
                await asyncio.sleep(PROBE_S)
            finally:
                self.cancel(ids)

    def _lose(self, reason: str) -> None:
        was_up, self.up = self.up, False
        self.reason = reason
        ended = self._end_flights(f"the replica was lost: {reason}")
        self.load.forget_sent()
        self._held.clear()
        self._stuck = False
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if was_up:
            level = logging.INFO if self.retired and not ended else logging.WARNING
            log.log(level, "link lost with %d requests in flight: %s", ended, reason)
        self._on_change()

    def _end_flights(self, why: str) -> int:
        flights, self._flights = {flight for flight, _ in self._flights.values()}, {}
        for flight in flights:
            flight.push(-1, Lost(why))
        return len(flights)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
