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
from typing import Any, Protocol, TypeVar

from gateway.api.config import ModelSpec, PoolSpec
from gateway.api.errors import YardError
from workers.driver import rank_link
from workers.driver.core import PoolCore
from workers.driver.effects import OWN_LINK, Ended, ModelFacts, RequestKey
from workers.driver.frames import Outbox
from workers.driver.group import Wanted
from workers.driver.launcher import RankLauncher
from workers.driver.observe import loads
from workers.driver.rank_link import RankLink
from workers.driver.sequence import Request
from workers.messages import Command, Done, Exit, Ping, Progress, Report, SampledToken, StepDone, Welcome

log = logging.getLogger(__name__)
_T = TypeVar("_T")

TICK_S = 0.1
ADOPT_TIMEOUT_S = 20.0
FIRST_RESTART_PAUSE_S = 0.5
LAST_RESTART_PAUSE_S = 20.0
STEADY_AFTER_S = 60.0  # ranks that lived so long start the restart pauses anew
_PING_OP = 2**62  # above every op of the core


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
    ) -> None:
        self.pool = pool
        self.incarnation = uuid.uuid4().hex
        self.welcomes: dict[int, Welcome] = {}
        capacity = spec.memory or 0
        self.core = PoolCore(spec.device, [capacity] * spec.devices, self, first_sequence=time.time_ns() // 1_000_000 << 20)
        self._launcher = launcher
        self._reader = reader
        self._observer = observer
        self._secret = secret
        self._clock = clock
        self._ranks: dict[int, RankLink] = {}
        self._ranks_since = 0.0
        self._restarts = 0
        self._outboxes: dict[int, Outbox] = {}
        self._logprobs: set[RequestKey] = set()
        self._next_link = OWN_LINK + 1
        self._tasks: set[asyncio.Task[Any]] = set()
        self._rank_task: asyncio.Task[None] | None = None
        self._closing = False
        self._drained = asyncio.Event()
        self.failure = ""  # not empty: a task ended that never should; the driver is unhealthy

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._bring_up("", adopt=True)
        self._own(self._tick(), "tick")

    async def close(self, *, end_ranks: bool) -> None:
        """`end_ranks`: the pool is deleted. Otherwise ranks stay for the next driver."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if end_ranks:
            for link in self._ranks.values():
                link.send(Exit())
            await asyncio.sleep(0.05)
        self._drop_ranks()
        if end_ranks:
            await self._launcher.stop()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and let what runs end, for at most so long."""
        self.core.on_closing()
        self._flush()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), grace_s)

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
        outbox.flush(0, loads(self.core.state), loads_alone=True)
        return link, outbox

    def close_link(self, link: int) -> None:
        if self._outboxes.pop(link, None) is not None:
            self._logprobs -= {key for key in self._logprobs if key[0] == link}
            self.core.on_link_closed(self.now(), link)
            self._flush()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.sampling.logprobs >= 0:
                self._logprobs.add(request.key)
            self.core.on_submit(self.now(), request)
        self._flush()

    def cancel(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self.core.on_cancel(self.now(), key)
        self._flush()

    def assign(self, fence: int, revision: int, wanted: Sequence[Wanted]) -> None:
        self.core.on_assign(self.now(), fence, revision, wanted)
        self._flush()

    # ------------------------------------------------------------------ effects of the core

    def send(self, rank: int, command: Command) -> None:
        self._ranks[rank].send(command)

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        if outbox := self._outboxes.get(key[0]):
            outbox.token(key[1], token, logprobs=key in self._logprobs)

    def end(self, key: RequestKey, ended: Ended) -> None:
        self._logprobs.discard(key)
        if outbox := self._outboxes.get(key[0]):
            outbox.end(key[1], ended)

    def hold(self, key: RequestKey, reason: str, wait_s: float) -> None:
        if outbox := self._outboxes.get(key[0]):
            outbox.hold(key[1], reason, wait_s)

    def inspect(self, group_id: int, model: str, spec: ModelSpec) -> None:
        async def work() -> None:
            result = await _or_reason(asyncio.to_thread(self._reader.facts, model, spec), model)
            self.core.on_inspected(self.now(), group_id, result)
            self._flush()

        self._own(work(), f"inspect-{model}")

    def prepare_canary(self, group_id: int, model: str, spec: ModelSpec) -> None:
        async def work() -> None:
            result = await _or_reason(asyncio.to_thread(self._reader.canary_prompt, spec), model)
            self.core.on_canary_prompt(self.now(), group_id, result)
            self._flush()

        self._own(work(), f"canary-{model}")

    def judge_canary(self, group_id: int, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> None:
        async def work() -> None:
            problem = await _or_reason(self._reader.judge(model, spec, placement, tokens), model)
            self.core.on_canary_judged(self.now(), group_id, problem)
            self._flush()

        self._own(work(), f"judge-{model}")

    def restart_ranks(self, reason: str) -> None:
        self._drop_ranks()
        if not self._closing:
            self._bring_up(reason, adopt=False)

    def event(self, kind: str, subject: str, message: str) -> None:
        log.info("pool %s: %s %s %s", self.pool, kind, subject, message)
        self._observer.event(kind, subject, message)

    def changed(self) -> None:
        self._observer.changed()

    # ------------------------------------------------------------------ ranks

    def _bring_up(self, reason: str, *, adopt: bool) -> None:
        if self._rank_task is not None and not self._rank_task.done():
            return
        self._rank_task = self._own(self._bring_up_ranks(reason, adopt=adopt), "ranks")

    async def _bring_up_ranks(self, reason: str, *, adopt: bool) -> None:
        """Adopt or start, again and again with growing pauses: a pool without ranks says why and does not give up."""
        if reason and self.now() - self._ranks_since > STEADY_AFTER_S:
            self._restarts = 0
        while True:
            if reason:
                await asyncio.sleep(min(FIRST_RESTART_PAUSE_S * 2**self._restarts, LAST_RESTART_PAUSE_S))
                self._restarts += 1
            try:
                links = (await self._adopt() if adopt else None) or await self._connect(await self._launcher.start())
                break
            except (YardError, OSError) as error:
                reason, adopt = f"the ranks of pool `{self.pool}` do not start: {error}", False
                self.core.state.message = reason
                self.event("ranks_failed", "", reason)
                self.changed()
        self._ranks = {link.rank: link for link in links}
        self.welcomes = {link.rank: link.welcome for link in links}
        self._ranks_since = self.now()
        for link in links:
            link.start(self._on_report, self._on_lost)
        self.core.on_ranks_up(self.now(), {link.rank: link.welcome.held for link in links})
        self._flush()

    async def _adopt(self) -> list[RankLink] | None:
        """The ranks of an earlier driver, if they live, agree on what they received, and still execute commands."""
        addresses = await self._launcher.find()
        if addresses is None:
            return None
        try:
            links = await self._connect(addresses)
        except YardError as error:
            self.event("adoption_failed", "", error.message)
            return None
        problem = _disagreement(links) or await self._ping(links)
        if problem:
            self.event("adoption_failed", "", problem)
            for link in links:
                link.close()
            return None
        return links

    async def _connect(self, addresses: Sequence[str]) -> list[RankLink]:
        links: list[RankLink] = []
        try:
            for rank, address in enumerate(addresses):
                links.append(await rank_link.connect(rank, address, self._secret, self.incarnation))
        except YardError:
            for link in links:
                link.close()
            raise
        return links

    async def _ping(self, links: Sequence[RankLink]) -> str:
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                for link in links:
                    link.send(Ping(op=_PING_OP))
                for link in links:
                    await link.expect_done(_PING_OP)
        except (TimeoutError, YardError) as error:
            return f"a rank of an earlier driver does not answer ({error or 'no reply'}); starting new ranks"
        return ""

    def _on_report(self, rank: int, report: Report) -> None:
        now = self.now()
        match report:
            case StepDone():
                self.core.on_step_done(now, report)
            case Done():
                self.core.on_op_done(now, rank, report)
            case Progress():
                self.core.on_progress(report, rank)
            case Welcome():
                log.warning("pool %s: rank %d welcomed twice", self.pool, rank)
        self._flush()

    def _on_lost(self, rank: int, reason: str) -> None:
        if rank in self._ranks and not self._closing:
            self.core.on_ranks_lost(self.now(), reason)
            self._flush()

    def _drop_ranks(self) -> None:
        for link in self._ranks.values():
            link.close()
        self._ranks = {}
        self.welcomes = {}

    # ------------------------------------------------------------------ inside

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.core.on_tick(self.now())
            self._flush(loads_alone=True)

    def _flush(self, *, loads_alone: bool = False) -> None:
        if self.core.state.closing and not self.core.state.sequences:
            self._drained.set()
        if not self._outboxes:
            return
        current = loads(self.core.state)
        for outbox in self._outboxes.values():
            outbox.flush(self.core.state.next_step, current, loads_alone=loads_alone)

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


def _disagreement(links: Sequence[RankLink]) -> str:
    """Members of one group that received different numbers of commands can never meet in a collective again."""
    counts: dict[int, set[int]] = {}
    for link in links:
        for shard in link.welcome.held:
            counts.setdefault(shard.group_id, set()).add(link.welcome.received.get(shard.group_id, 0))
    broken = sorted(group_id for group_id, seen in counts.items() if len(seen) > 1)
    return (
        f"ranks disagree on the commands of groups {broken}: their driver died between two sends; starting new ranks"
        if broken
        else ""
    )
