"""The one thread of a rank that computes, and the threads that load beside it.

Everything that touches a device or a communicator runs on the compute thread, in the order in which the commands arrived.
Loading only *begins* there (the communicator is made in order, as every member must) and *ends* there (the finished shard
is installed in order); between the two it has a thread of its own (rule 7). Shards on a GPU enqueue their steps; a second thread
waits for what comes of them and reports it, in the same order.
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
from workers.engines.base import Engine, EnqueuingShard, PendingStep, Shard
from workers.memory.arena import Arena
from workers.messages import (
    Done,
    GrowKv,
    HeldShard,
    Inventory,
    LoadShard,
    Ping,
    Progress,
    Report,
    Step,
    StepDone,
    UnloadShard,
)

log = logging.getLogger(__name__)


class GroupCommFactory(Protocol):
    def __call__(self, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, group_id: int) -> GroupComm: ...


EngineFactory = Callable[[str], Engine]
"""Engine of a name of ModelSpec.engine."""


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
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._results = threading.Thread(target=self._report_results, name="results", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._results.start()

    def submit(self, command: LoadShard | UnloadShard | GrowKv | Step | Inventory | Ping) -> None:
        self._queue.put(lambda: self._execute(command))

    def abandon_loads(self) -> None:
        """The driver that asked for the loads under way is gone: their shards are closed as soon as they are there."""
        self._queue.put(lambda: self._abandoned.update(self._loading))

    def stop(self, timeout_s: float) -> bool:
        """Free every shard after the commands before it; False when that did not end in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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

    def _execute(self, command: LoadShard | UnloadShard | GrowKv | Step | Inventory | Ping) -> None:
        match command:
            case Step():
                self._step(command)
            case LoadShard():
                self._begin_load(command)
            case GrowKv():
                self._grow(command)
            case UnloadShard():
                self._unload(command)
            case Inventory():
                self._report(Done(op=command.op, inventory=tuple(shard.held() for shard in self._shards.values())))
            case Ping():
                self._report(Done(op=command.op))

    def _step(self, command: Step) -> None:
        shard = self._shards.get(command.group_id)
        if shard is None:
            self._report(_failed_step(command, f"rank {self._rank} holds no shard of group {command.group_id}"))
            return
        enqueuing = self._enqueuing.get(command.group_id)
        try:
            if enqueuing is not None:
                pending, done = enqueuing.begin(command), None
            else:
                pending, done = None, shard.step(command)
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

    def _begin_load(self, command: LoadShard) -> None:
        if command.group_id in self._comms:
            self._report(Done(op=command.op, error=f"group {command.group_id} is already loaded or loading"))
            return
        self._comms[command.group_id] = self._make_comm(
            command.ranks, command.tensor_parallel, command.pipeline_parallel, command.group_id
        )
        self._loading.add(command.group_id)
        name = f"load-{command.model}-{command.group_id}"
        threading.Thread(target=self._load, args=(command, self._comms[command.group_id]), name=name, daemon=True).start()

    def _load(self, command: LoadShard, comm: GroupComm) -> None:
        """On a thread of its own. The arena is left as it was when this fails; the communicator waits for the unload."""

        def progress(fraction: float, what: str) -> None:
            self._report(Progress(op=command.op, fraction=fraction, what=what))

        try:
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

    def _unload(self, command: UnloadShard) -> None:
        """Unloading what is not here is no error: the driver unloads all ranks after a load that failed on some."""
        if command.group_id in self._loading:
            self._abandoned.add(command.group_id)
        else:
            self._close(command.group_id)
        self._report(Done(op=command.op))

    def _close(self, group_id: int) -> None:
        shard = self._shards.pop(group_id, None)
        self._enqueuing.pop(group_id, None)
        if shard is not None:
            shard.close()
        comm = self._comms.pop(group_id, None)
        if comm is not None:
            comm.close()

    def held(self) -> tuple[HeldShard, ...]:
        """For the compute thread and tests that have stopped it."""
        return tuple(shard.held() for shard in self._shards.values())


def _failed_step(command: Step, error: str) -> StepDone:
    return StepDone(step=command.step, group_id=command.group_id, sampled=(), seconds=0.0, error=error)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
