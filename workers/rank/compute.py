"""The one thread of a rank that computes, and the threads that load beside it.

Everything that touches a device or a communicator runs on the compute thread, in the order in which the commands arrived.
Loading only *begins* there (the communicator is made in order, as every member must) and *ends* there (the finished shard
is installed in order); between the two it has another thread (rule 7). So do the copies of a park and of a wake; pages are
taken away and put back here, in order. Shards on a GPU enqueue their steps; a second thread waits for what comes of them and
reports it, in the same order.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from gateway.api.config import ModelSpec
from workers.comm.base import GroupComm
from workers.engines.base import (
    ConstrainedShard,
    DamagedModelError,
    Engine,
    EnqueuingShard,
    ParkableShard,
    PendingStep,
    Shard,
    Waking,
)
from workers.memory.arena import Arena
from workers.messages import (
    Constrain,
    Constrained,
    Done,
    GrowKv,
    HeldShard,
    Inventory,
    LoadShard,
    ParkShard,
    Ping,
    Progress,
    Report,
    Step,
    StepDone,
    UnloadShard,
    WakeShard,
)

log = logging.getLogger(__name__)


class GroupCommFactory(Protocol):
    def __call__(self, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, number: int) -> GroupComm:
        """`number`: of the load, the same on all members and never used twice. Exchanges nothing."""
        ...


EngineFactory = Callable[[str], Engine]
"""Engine of a name of ModelSpec.engine."""

Work = LoadShard | UnloadShard | GrowKv | ParkShard | WakeShard | Constrain | Step | Inventory | Ping

WAKE_TIMEOUT_S = 300.0
HELPERS = 4
"""Threads for what goes on beside the steps. They are started with the rank: a new thread of a process that gets no more memory
may end before its first line, and whoever started it waits for ever. Commands reach all ranks of a group in one order, so the
oldest finds a helper on each of them."""


class ComputeThread:
    """Executes commands in order; `report` is called from this thread or a loader's, `fatal` when the process must end."""

    def __init__(
        self,
        rank: int,
        arena: Arena,
        make_comm: GroupCommFactory,
        make_engine: EngineFactory,
        report: Callable[[Report], None],
        fatal: Callable[[str], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """`prepare` runs first of all on the thread."""
        self._rank = rank
        self._arena = arena
        self._make_comm = make_comm
        self._make_engine = make_engine
        self._report = report
        self._fatal = fatal
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queue.put(prepare)
        self._shards: dict[int, Shard] = {}
        self._enqueuing: dict[int, EnqueuingShard] = {}  # those of them that are
        self._pending: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._comms: dict[int, GroupComm] = {}
        self._engines: dict[str, Engine] = {}
        self._abandoned: set[int] = set()  # groups whose load nobody waits for any more
        self._loading: set[int] = set()
        self._moving: set[int] = set()  # groups whose weights are being copied out or back
        self._deferred: dict[int, list[Work]] = {}  # what a new driver wants of those meanwhile
        self._away: set[int] = set()  # groups that cannot compute: parked, or not back yet
        self._beside: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._schemas: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._compiler = threading.Thread(target=self._compile, name="schemas", daemon=True)
        self._helpers = [threading.Thread(target=self._help, name=f"helper-{index}", daemon=True) for index in range(HELPERS)]
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._results = threading.Thread(target=self._report_results, name="results", daemon=True)

    def start(self) -> None:
        for thread in (self._thread, self._results, self._compiler, *self._helpers):
            thread.start()

    def submit(self, command: Work) -> None:
        self._queue.put(lambda: self._execute(command))

    def abandon_loads(self) -> None:
        """The driver that asked for what is under way is gone. Shards that load are closed as soon as they are there; one that is
        being parked stays, one that is being woken parks again: so it is as the next driver was told."""

        def abandon() -> None:
            self._abandoned.update(self._loading, self._moving)
            for shard in self._shards.values():
                if isinstance(shard, ConstrainedShard):
                    shard.forget_constraint(None)

        self._queue.put(abandon)

    def stop(self, timeout_s: float) -> bool:
        """Free every shard after the commands before it; False when that did not end in time."""
        self._queue.put(None)
        self._schemas.put(None)
        for _ in self._helpers:
            self._beside.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _help(self) -> None:
        while (work := self._beside.get()) is not None:
            work()

    def _compile(self) -> None:
        """Schemas have a thread of their own: one that takes long must not keep a load or a park waiting."""
        while (work := self._schemas.get()) is not None:
            work()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it and says so
                self._fatal(traceback.format_exc())
                return
        for group_id in list(self._shards):
            self._close(group_id)
        self._pending.put(None)

    def _report_results(self) -> None:
        while (pending := self._pending.get()) is not None:
            try:
                self._report(pending.result())
            except BaseException:  # noqa: BLE001 - the device is lost, and with it all that it holds
                self._fatal(traceback.format_exc())
                return

    def _execute(self, command: Work) -> None:
        if isinstance(command, ParkShard | WakeShard | UnloadShard) and command.group_id in self._moving:
            self._deferred.setdefault(command.group_id, []).append(command)
            return
        match command:
            case Step():
                self._step(command)
            case LoadShard():
                self._begin_load(command)
            case GrowKv():
                self._grow(command)
            case ParkShard():
                self._begin_park(command)
            case WakeShard():
                self._begin_wake(command)
            case UnloadShard():
                self._unload(command)
            case Constrain():
                self._constrain(command)
            case Inventory():
                self._report(Done(op=command.op, inventory=tuple(shard.held() for shard in self._shards.values())))
            case Ping():
                self._report(Done(op=command.op))

    def _step(self, command: Step) -> None:
        shard = self._shards.get(command.group_id)
        if shard is None:
            self._report(_failed_step(command, f"rank {self._rank} holds no shard of group {command.group_id}"))
            return
        if command.group_id in self._away:
            self._report(_failed_step(command, f"group {command.group_id} is parked on rank {self._rank}"))
            return
        enqueuing = self._enqueuing.get(command.group_id)
        try:
            if enqueuing is not None:
                pending, done = enqueuing.begin(command), None
            else:
                pending, done = None, shard.step(command)
        except DamagedModelError as error:
            self._report(_failed_step(command, _describe(error), damaged=True))
            return
        except Exception as error:
            self._report(_failed_step(command, _describe(error)))
            if len(shard.held().ranks) > 1:
                # Its peers wait in a collective that will not come; only a restart of the whole group ends that (rule 11).
                raise
            log.exception("step %d of group %d failed", command.step, command.group_id)
            return
        if pending is not None:
            self._pending.put(pending)
        if done is not None:
            self._report(done)

    def _constrain(self, command: Constrain) -> None:
        shard = self._shards.get(command.group_id)
        if not command.json_schema:
            if isinstance(shard, ConstrainedShard):
                shard.forget_constraint(command.sequence)
            return
        if not isinstance(shard, ConstrainedShard):
            text = "its engine cannot hold answers to a schema" if shard else f"rank {self._rank} holds no shard of it"
            self._report(Constrained(command.group_id, command.sequence, text))
            return
        try:
            work = shard.constrain(command.sequence, command.json_schema)
        except ValueError as error:
            self._report(Constrained(command.group_id, command.sequence, _describe(error)))
            return

        def compile_it() -> None:
            try:
                done = Constrained(command.group_id, command.sequence, grammar_bytes=work())
            except Exception as error:  # noqa: BLE001 - whatever it was, it is of this sequence alone
                done = Constrained(command.group_id, command.sequence, _describe(error))
            self._report(done)

        self._schemas.put(compile_it)

    def _begin_load(self, command: LoadShard) -> None:
        if command.group_id in self._comms:
            self._report(Done(op=command.op, error=f"group {command.group_id} is already loaded or loading"))
            return
        self._comms[command.group_id] = self._make_comm(
            command.ranks, command.tensor_parallel, command.pipeline_parallel, command.op
        )
        self._loading.add(command.group_id)
        comm = self._comms[command.group_id]
        self._beside.put(lambda: self._load(command, comm))

    def _load(self, command: LoadShard, comm: GroupComm) -> None:
        """On a helper. The arena is left as it was when this fails; the communicator waits for the unload."""

        def progress(fraction: float, what: str, note: str = "") -> None:
            self._report(Progress(op=command.op, fraction=fraction, what=what, note=note))

        try:
            # Before anything that can fail on one rank alone: its peers would wait here for it.
            comm.connect()
            spec = ModelSpec.model_validate_json(command.spec_json)
            engine = self._engines.get(spec.engine) or self._engines.setdefault(spec.engine, self._make_engine(spec.engine))
            shard = engine.load(command, self._rank, self._arena, comm, progress)
        except Exception as error:
            log.exception("loading %s (group %d) failed", command.model, command.group_id)
            text = _describe(error)
            self._queue.put(lambda: self._loading.discard(command.group_id))
            self._report(Done(op=command.op, error=text))
            return
        self._queue.put(lambda: self._install(command, shard))

    def _install(self, command: LoadShard, shard: Shard) -> None:
        self._loading.discard(command.group_id)
        self._shards[command.group_id] = shard
        if isinstance(shard, EnqueuingShard):
            self._enqueuing[command.group_id] = shard
        if command.group_id in self._abandoned:
            self._abandoned.discard(command.group_id)
            self._close(command.group_id)
            self._report(Done(op=command.op, error="the driver that asked for this load is gone"))
            return
        self._report(Done(op=command.op, held=shard.held()))

    def _grow(self, command: GrowKv) -> None:
        shard = self._shards.get(command.group_id)
        if shard is None:
            self._report(Done(op=command.op, error=f"rank {self._rank} holds no shard of group {command.group_id}"))
            return
        try:
            shard.grow_kv(command.blocks)
        except MemoryError as error:
            self._report(Done(op=command.op, error=_describe(error), held=shard.held()))
            return
        self._report(Done(op=command.op, held=shard.held()))

    def _begin_park(self, command: ParkShard) -> None:
        shard = self._parkable(command)
        if shard is None:
            return
        if command.group_id in self._away:
            self._report(Done(op=command.op, held=shard.held()))
            return
        if command.released:
            shard.step(Step(step=0, group_id=command.group_id, sequences=(), released=command.released))
        for group_id in command.drop_copies:
            other = self._shards.get(group_id)
            if isinstance(other, ParkableShard) and group_id not in self._away and group_id not in self._moving:
                other.drop_copy()
        self._moving.add(command.group_id)

        def save() -> None:
            error = _attempt(shard.save)
            self._queue.put(lambda: self._end_park(command, shard, error))

        self._beside.put(save)

    def _end_park(self, command: ParkShard, shard: ParkableShard, error: str) -> None:
        """In order: here its pages go."""
        abandoned = self._moved(command.group_id)
        error = error or ("the driver that asked for this is gone" if abandoned else _attempt(shard.park))
        if not error:
            self._away.add(command.group_id)
        self._report(Done(op=command.op, error=error, held=shard.held()))
        self._resume(command.group_id)

    def _begin_wake(self, command: WakeShard) -> None:
        """In order: here its pages come, and are filled beside the steps."""
        shard = self._parkable(command)
        if shard is None:
            return
        if command.group_id not in self._away:
            self._report(Done(op=command.op, held=shard.held()))
            return
        try:
            waking = shard.wake(command.kv_blocks)
        except Exception as error:
            log.exception("waking group %d failed", command.group_id)
            self._report(Done(op=command.op, error=_describe(error), held=shard.held()))
            return
        self._moving.add(command.group_id)

        def copy(waking: Waking = waking) -> None:
            error = _attempt(lambda: waking.wait(WAKE_TIMEOUT_S))
            self._queue.put(lambda: self._end_wake(command, shard, error))

        self._beside.put(copy)

    def _end_wake(self, command: WakeShard, shard: ParkableShard, error: str) -> None:
        if self._moved(command.group_id) and not error:
            error = _attempt(shard.save) or _attempt(shard.park) or "the driver that asked for this is gone"
        if not error:
            self._away.discard(command.group_id)
        self._report(Done(op=command.op, error=error, held=shard.held()))
        self._resume(command.group_id)

    def _parkable(self, command: ParkShard | WakeShard) -> ParkableShard | None:
        """None: it was reported why not."""
        shard = self._shards.get(command.group_id)
        if shard is None:
            self._report(Done(op=command.op, error=f"rank {self._rank} holds no shard of group {command.group_id}"))
            return None
        if not isinstance(shard, ParkableShard):
            self._report(Done(op=command.op, error="its engine cannot park", held=shard.held()))
            return None
        return shard

    def _moved(self, group_id: int) -> bool:
        """The copy is over; True when the driver that asked for it is gone."""
        self._moving.discard(group_id)
        abandoned = group_id in self._abandoned
        self._abandoned.discard(group_id)
        return abandoned

    def _resume(self, group_id: int) -> None:
        for command in self._deferred.pop(group_id, ()):
            self._execute(command)

    def _unload(self, command: UnloadShard) -> None:
        """Unloading what is not here is no error: the driver unloads all ranks after a load that failed on some."""
        if command.group_id in self._loading:
            self._abandoned.add(command.group_id)
        else:
            self._close(command.group_id)
        self._report(Done(op=command.op))

    def _close(self, group_id: int) -> None:
        shard = self._shards.pop(group_id, None)
        self._away.discard(group_id)
        self._enqueuing.pop(group_id, None)
        if shard is not None:
            shard.close()
        comm = self._comms.pop(group_id, None)
        if comm is not None:
            comm.close()

    def held(self) -> tuple[HeldShard, ...]:
        """For the compute thread and tests that have stopped it."""
        return tuple(shard.held() for shard in self._shards.values())


def _failed_step(command: Step, error: str, *, damaged: bool = False) -> StepDone:
    return StepDone(step=command.step, group_id=command.group_id, sampled=(), seconds=0.0, error=error, damaged=damaged)


def _attempt(work: Callable[[], None]) -> str:
    """Empty, or why it failed."""
    try:
        work()
    except Exception as error:
        log.exception("moving weights failed")
        return _describe(error)
    return ""


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
