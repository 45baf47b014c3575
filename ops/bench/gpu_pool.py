"""A pool of one GPU in this process: the driver's own core and the rank's own compute thread, without sockets between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import ModelSpec
from workers.driver.core import PoolCore
from workers.driver.effects import Ended, ModelFacts, RequestKey
from workers.driver.group import Wanted
from workers.driver.sequence import Request
from workers.driver.sizing import Placement
from workers.messages import Command, Done, GrowKv, LoadShard, Progress, Report, SampledToken, Step, StepDone, UnloadShard
from workers.rank.compute import ComputeThread
from workers.rank.config import RankConfig
from workers.rank.gpu import GpuRank

LINK = 1
_CANARY = (1, 2, 3, 4)


class GpuPool:
    """Is the core's `Effects`. All events are handled by the thread that calls `until`."""

    def __init__(self, capacity_bytes: int, cache_dir: Path, directory: Path) -> None:
        self._cache_dir = cache_dir
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        config = RankConfig("bench", 0, "cuda", capacity_bytes, directory, cache_dir, 60.0, "unused")
        self.rank = GpuRank(config)
        rank = self.rank
        self._compute = ComputeThread(
            0, rank.arena, rank.make_comm, rank.make_engine, report=self._on_report, fatal=self._on_fatal, prepare=rank.prepare
        )
        self.core = PoolCore("cuda", [rank.arena.capacity_bytes], self)
        self._compute.start()
        self._fences = 0
        self._ids = 0
        self.tokens: dict[RequestKey, list[float]] = {}  # when each token was known
        self.texts: dict[RequestKey, list[int]] = {}
        self.ended: dict[RequestKey, Ended] = {}
        self.steps = 0
        self.core.on_ranks_up(time.monotonic(), {0: ()})

    def assign(self, specs: dict[str, ModelSpec]) -> None:
        """Returns when all of them serve. RuntimeError when one does not."""
        self._fences += 1
        wanted = [Wanted(name, 1, spec, spec.model_dump_json(), Placement((0,), 1, 1)) for name, spec in specs.items()]
        self.core.on_assign(time.monotonic(), self._fences, self._fences, wanted)
        self.until(self._settled)

    def _settled(self) -> bool:
        groups = list(self.core.state.groups.values())
        for group in groups:
            if group.state == "failed":
                raise RuntimeError(f"model {group.model}: {group.reason}")
        return all(group.state == "ready" for group in groups)

    def submit(self, model: str, prompt: Sequence[int], max_tokens: int) -> RequestKey:
        self._ids += 1
        key = (LINK, self._ids)
        self.tokens[key], self.texts[key] = [], []
        self.core.on_submit(time.monotonic(), Request(key, model, tuple(prompt), max_tokens, ignore_eos=True))
        return key

    def until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            try:
                self._events.get(timeout=0.05)()
            except queue.Empty:
                self.core.on_tick(time.monotonic())
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not so after {timeout_s} s") from None

    def finish(self, keys: Sequence[RequestKey]) -> None:
        self.until(lambda: all(key in self.ended for key in keys))
        for key in keys:
            if self.ended[key].finish_reason != "length":
                raise RuntimeError(f"request {key} ended with {self.ended[key]}")

    def close(self) -> None:
        self.assign({})
        self.until(lambda: not self.core.state.groups)
        self._compute.stop(60.0)

    # ---------------------------------------------------------------- effects

    def send(self, rank: int, command: Command) -> None:
        assert isinstance(command, LoadShard | UnloadShard | GrowKv | Step)
        self.steps += isinstance(command, Step)
        self._compute.submit(command)

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        self.tokens[key].append(time.perf_counter())
        self.texts[key].append(token.token)

    def end(self, key: RequestKey, ended: Ended) -> None:
        self.ended[key] = ended

    def hold(self, key: RequestKey, reason: str, wait_s: float) -> None:
        pass

    def inspect(self, group_id: int, model: str, spec: ModelSpec) -> None:
        def look() -> None:
            found = open_checkpoint(spec.source, self._cache_dir)
            facts = ModelFacts(found.shape, found.digest, found.precision, found.max_context, found.eos_ids)
            self._events.put(lambda: self.core.on_inspected(time.monotonic(), group_id, facts))

        threading.Thread(target=look, daemon=True).start()

    def prepare_canary(self, group_id: int, model: str, spec: ModelSpec) -> None:
        self._events.put(lambda: self.core.on_canary_prompt(time.monotonic(), group_id, _CANARY))

    def judge_canary(self, group_id: int, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> None:
        self._events.put(lambda: self.core.on_canary_judged(time.monotonic(), group_id, ""))

    def to_engine(self, group_id: int, message: object) -> None:
        raise RuntimeError("all engines of this pool run in its rank")

    def drop_engine(self, group_id: int) -> None:
        raise RuntimeError("all engines of this pool run in its rank")

    def restart_ranks(self, reason: str) -> None:
        raise RuntimeError(reason)

    def event(self, kind: str, subject: str, message: str) -> None:
        pass

    def changed(self) -> None:
        pass

    # ---------------------------------------------------------------- from the compute thread

    def _on_report(self, report: Report) -> None:
        match report:
            case StepDone():
                if report.error:
                    print(f"step {report.step}: {report.error}", flush=True)
                self._events.put(lambda: self.core.on_step_done(time.monotonic(), report))
            case Done():
                if report.error:
                    print(f"op {report.op}: {report.error}", flush=True)
                self._events.put(lambda: self.core.on_op_done(time.monotonic(), 0, report))
            case Progress():
                self._events.put(lambda: self.core.on_progress(time.monotonic(), 0, report))
            case _:
                pass

    def _on_fatal(self, trace: str) -> None:
        def fail() -> None:
            raise RuntimeError(trace)

        self._events.put(fail)
