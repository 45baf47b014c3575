"""The shell around the pool core: one event loop, the ranks' connections, the gateways' streams, slow work on threads.

Every method that ends in `core.on_…` is called on the loop; after each event the frames of all gateways are let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gateway.api.config import EngineSpec, ModelSpec, PoolSpec
from gateway.api.errors import YardError
from workers.driver.core import PoolCore
from workers.driver.effects import OWN_LINK, Ended, ModelFacts, RequestKey
from workers.driver.engine_hosts import EngineHosts
from workers.driver.engine_reports import EngineReports
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import LocalSeat
from workers.driver.frames import Outbox
from workers.driver.group import Wanted
from workers.driver.host_memory import standby_capacities
from workers.driver.launcher import RankLauncher
from workers.driver.observe import loads
from workers.driver.places import Places
from workers.driver.rank_fleet import RankFleet
from workers.driver.rank_link import RankLink
from workers.driver.request_traces import RequestTraces
from workers.driver.sequence import Request
from workers.engines.trtllm.messages import Cancel, Generate
from workers.messages import Command, Constrained, DeviceLoad, Done, HeldShard, Progress, Report, SampledToken, StepDone, Welcome

log = logging.getLogger(__name__)
_T = TypeVar("_T")

TICK_S = 0.1
ALIVE_S = 1.0  # so often each gateway gets a frame, also an empty one
FIRST_RESTART_PAUSE_S = 0.5
LAST_RESTART_PAUSE_S = 20.0
STEADY_AFTER_S = 60.0  # ranks that lived so long start the restart pauses anew


class ModelReader(Protocol):
    """Slow facts about models; called on threads, except `judge`."""

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts: ...

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]: ...

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str: ...


class Observer(Protocol):
    def event(self, kind: str, subject: str, message: str) -> None: ...

    def changed(self) -> None: ...


class PoolLoop:
    """Is the `Effects` of its core."""

    def __init__(
        self,
        pool: str,
        spec: PoolSpec,
        launcher: RankLauncher,
        reader: ModelReader,
        observer: Observer,
        secret: str,
        clock: Callable[[], float] = time.monotonic,
        engine: EngineRuntime | None = None,
    ) -> None:
        self.pool = pool
        self._spec = spec
        self.incarnation = uuid.uuid4().hex
        capacity = spec.memory or 0
        self.core = PoolCore(spec.device, [capacity] * spec.devices, self, first_sequence=time.time_ns() // 1_000_000 << 20)
        self._reader = reader
        self._observer = observer
        self._clock = clock
        self._ranks = RankFleet(launcher, secret, self.incarnation)
        # The devices of a pool without rank processes.
        self._places = launcher if isinstance(launcher, Places) else None
        if self._places is not None:
            self._places.on_lost = self._on_lost
        self._hosts = EngineHosts(
            engine or EngineRuntime(EngineSpec(), LocalSeat(Path("/nonexistent")), Path("/nonexistent")),
            EngineReports(self._tell, self.core, self.event),
            self._own,
            secret=secret,
            driver=self.incarnation,
            devices=spec.devices,
            grace_s=spec.rank_grace_s,
        )
        self._ranks_since = 0.0
        self._restarts = 0
        self.device_loads: dict[int, DeviceLoad] = {}  # by rank, the last that each said
        self._outboxes: dict[int, Outbox] = {}
        self._logprobs: set[RequestKey] = set()
        self._traces = RequestTraces(pool)
        self._next_link = OWN_LINK + 1
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._drained = asyncio.Event()
        self.failure = ""  # not empty: a task ended that never should; the driver is unhealthy

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self.core.state.adopting = True
        self._own(self._bring_up_ranks("", adopt=True), "ranks")
        self._own(self._tick(), "tick")

    async def close(self, *, end_ranks: bool) -> None:
        """`end_ranks`: the pool is deleted. Otherwise ranks stay for the next driver."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if end_ranks:
            await self._hosts.end()
            await self._ranks.end()
        else:
            self._hosts.leave()
            self._ranks.drop()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and let what runs end, for at most so long."""
        self._tell(self.core.on_closing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._drained.wait()

    @property
    def welcomes(self) -> dict[int, Welcome]:
        return self._places.welcomes() if self._places is not None else self._ranks.welcomes

    @property
    def seen(self) -> dict[int, Welcome]:
        """The same, with what ranks that are away said last."""
        return self._places.welcomes() if self._places is not None else self._ranks.seen

    def now(self) -> float:
        return self._clock()

    @property
    def stalled_s(self) -> float:
        """For how long requests have been in flight without a step (rule 11)."""
        return self.core.stalled_s(self.now())

    # ------------------------------------------------------------------ from the server

    def open_link(self, gateway: str) -> tuple[int, Outbox]:
        link = self._next_link
        self._next_link += 1
        outbox = self._outboxes[link] = Outbox(gateway)
        outbox.flush(self.core.state.steps_done, loads(self.core.state), alone=True)
        return link, outbox

    def close_link(self, link: int) -> None:
        if self._outboxes.pop(link, None) is not None:
            self._logprobs -= {key for key in self._logprobs if key[0] == link}
            self._tell(self.core.on_link_closed, link)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.sampling.logprobs >= 0:
                self._logprobs.add(request.key)
            self._traces.begin(request)
            self._tell(self.core.on_submit, request)

    def cancel(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self._tell(self.core.on_cancel, key)

    def assign(self, fence: int, revision: int, wanted: Sequence[Wanted]) -> None:
        self._tell(self.core.on_assign, fence, revision, wanted)

    def set_residency(self, fence: int, model: str, residency: str) -> str:
        """The state that the model has now, on its way there."""
        return self._tell(self.core.on_set_residency, fence, model, residency)

    # ------------------------------------------------------------------ effects of the core

    def send(self, rank: int, command: Command) -> None:
        if not self._hosts.take(rank, command):
            self._ranks.send(rank, command)

    def to_engine(self, group_id: int, message: Generate | Cancel) -> None:
        self._hosts.to_engine(group_id, message)

    def drop_engine(self, group_id: int) -> None:
        self._hosts.drop(group_id)

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        self._traces.token(key)
        if outbox := self._outboxes.get(key[0]):
            outbox.token(key[1], token, logprobs=key in self._logprobs)

    def end(self, key: RequestKey, ended: Ended) -> None:
        self._logprobs.discard(key)
        self._traces.end(key, ended)
        if outbox := self._outboxes.get(key[0]):
            outbox.end(key[1], ended)

    def hold(self, key: RequestKey, reason: str, wait_s: float) -> None:
        self._traces.held(key, reason)
        if outbox := self._outboxes.get(key[0]):
            outbox.hold(key[1], reason, wait_s)

    def inspect(self, group_id: int, model: str, spec: ModelSpec) -> None:
        async def read() -> ModelFacts:
            if spec.engine == "trtllm":
                await self._hosts.runtime.check(model, spec)
            return await asyncio.to_thread(self._reader.facts, model, spec)

        async def work() -> None:
            self._tell(self.core.on_inspected, group_id, await _or_reason(read(), model))

        self._own(work(), f"inspect-{model}")

    def prepare_canary(self, group_id: int, model: str, spec: ModelSpec) -> None:
        async def work() -> None:
            result = await _or_reason(asyncio.to_thread(self._reader.canary_prompt, spec), model)
            self._tell(self.core.on_canary_prompt, group_id, result)

        self._own(work(), f"canary-{model}")

    def judge_canary(self, group_id: int, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> None:
        async def work() -> None:
            problem = await _or_reason(self._reader.judge(model, spec, placement, tokens), model)
            self._tell(self.core.on_canary_judged, group_id, problem)

        self._own(work(), f"judge-{model}")

    def restart_ranks(self, reason: str) -> None:
        self._ranks.drop()
        self.device_loads.clear()
        self.core.state.rank_restarts += 1
        # A driver that stops starts nothing: its successor may have taken the ranks, and two would fight over them (rule 1).
        if not (self._closing or self.core.state.closing):
            self._own(self._bring_up_ranks(reason, adopt=False), "ranks")

    def event(self, kind: str, subject: str, message: str) -> None:
        log.info("pool %s: %s %s %s", self.pool, kind, subject, message)
        self._observer.event(kind, subject, message)

    def changed(self) -> None:
        self._observer.changed()

    # ------------------------------------------------------------------ ranks

    async def _bring_up_ranks(self, reason: str, *, adopt: bool) -> None:
        """Adopt or start, again and again with growing pauses: a pool without ranks says why and does not give up."""
        if reason and self.now() - self._ranks_since > STEADY_AFTER_S:
            self._restarts = 0
        held: dict[int, list[HeldShard]] = await self._hosts.adopt() if adopt else {}
        links = await self._adopt_ranks() if adopt else None
        if links is None and adopt:
            self._tell(self.core.on_nothing_adopted)
        while links is None:
            if reason:
                await asyncio.sleep(min(FIRST_RESTART_PAUSE_S * 2**self._restarts, LAST_RESTART_PAUSE_S))
                self._restarts += 1
            try:
                links = await self._ranks.start()
            except (YardError, OSError) as error:
                reason = f"the ranks of pool `{self.pool}` do not start: {error}"
                self.core.state.message = reason
                self.event("ranks_failed", "", reason)
                self.changed()
        self._ranks_since = self.now()
        self._ranks.use(links, self._own, self._on_report, self._on_lost)
        capacities = standby_capacities(self._spec, self.core.state.capacities, self.welcomes)
        self._tell(self.core.on_host_memory, capacities)
        devices = {link.rank: link.welcome.memory for link in links if link.welcome.memory is not None}
        for link in links:
            held.setdefault(link.rank, []).extend(link.welcome.held)
        self._tell(self.core.on_ranks_up, {rank: tuple(shards) for rank, shards in held.items()}, devices)
        if self._spec.device == "cuda" and "trtllm" in self._spec.engines and self._hosts.runtime.settings.python:
            self._own(self._learn_engine(), "learn-engine")

    async def _learn_engine(self) -> None:
        """What TensorRT-LLM can do here, so that plans know it before a model is loaded."""
        with contextlib.suppress(YardError):  # it is in the record, and a load asks again
            await self._hosts.runtime.known_features()
        self.changed()

    async def _adopt_ranks(self) -> list[RankLink] | None:
        try:
            return await self._ranks.adopt()
        except (YardError, OSError) as error:
            self.event("adoption_failed", "", f"{error}; starting new ranks")
            return None

    def _on_report(self, rank: int, report: Report) -> None:
        match report:
            case StepDone():
                self._tell(self.core.on_step_done, report)
            case Done():
                self._tell(self.core.on_op_done, rank, report)
            case Progress():
                self._tell(self.core.on_progress, rank, report)
            case Constrained():
                self._tell(self.core.on_constrained, rank, report)
            case DeviceLoad():
                self.device_loads[rank] = report
                known = [load.link_bytes_per_s for load in self.device_loads.values() if load.link_bytes_per_s]
                self.core.state.link_bytes_per_s = min(known, default=0.0)
            case Welcome():
                log.warning("pool %s: rank %d welcomed twice", self.pool, rank)

    def _on_lost(self, reason: str) -> None:
        if not self._closing:
            self._tell(self.core.on_ranks_lost, reason)

    # ------------------------------------------------------------------ inside

    async def _tick(self) -> None:
        said_at = self.now()
        while True:
            await asyncio.sleep(TICK_S)
            self._tell(self.core.on_tick)
            alive = self.now() - said_at >= ALIVE_S
            said_at = self.now() if alive else said_at
            self._flush(alone=True, alive=alive)

    def _tell(self, event: Callable[..., _T], *what: object) -> _T:
        """Give the core one event, let the frames go. YardError is a refusal; anything else is a defect and makes unhealthy."""
        try:
            answer = event(self.now(), *what)
        except YardError:
            raise
        except Exception as error:
            self.failure = f"{event.__name__} failed: {error!r}"
            raise
        self._flush()
        return answer

    def _flush(self, *, alone: bool = False, alive: bool = False) -> None:
        if self.core.state.closing and not self.core.state.sequences:
            self._drained.set()
        if not self._outboxes:
            return
        current = loads(self.core.state)
        for outbox in self._outboxes.values():
            outbox.flush(self.core.state.steps_done, current, alone=alone, alive=alive)

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("pool %s: task %s failed", self.pool, task.get_name(), exc_info=error)
            self.failure = f"task {task.get_name()} failed: {error!r}"


async def _or_reason(work: Awaitable[_T], model: str) -> _T | str:
    """The result, or why there is none: anything that reading a checkpoint can raise is the model's failure, not the pool's."""
    try:
        return await work
    except YardError as error:
        return error.message
    except Exception as error:
        log.exception("model %s", model)
        return f"{type(error).__name__}: {error}"
