"""One rank's part of one worker group on a GPU. `begin` enqueues a step; `PendingStep.result` waits for its tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from workers.comm.base import GroupComm
from workers.engines.base import DamagedModelError
from workers.engines.torch.constraint import Constraints
from workers.engines.torch.cuda.draw import Drawn, DrawState, LogProbabilities, draw
from workers.engines.torch.cuda.residency import WAIT_S, FixedMemory, ParkedMemory
from workers.engines.torch.cuda.sequences import Part, SequenceTable
from workers.engines.torch.cuda.stack import BeforeLayer
from workers.engines.torch.cuda.steps import EagerSteps, GraphSteps
from workers.engines.torch.shard import ShardFacts
from workers.engines.torch.stage import StageModel
from workers.memory.copy_engine import Transfer
from workers.messages import HeldShard, LoadShard, Step, StepDone


@dataclass
class PendingStep:
    """A step that is enqueued. `result` may be called by another thread than the one that enqueues."""

    step: Step
    began: float
    sequences: list[int]
    states: list[DrawState]
    drawn: Drawn | None  # on the host, once `arrived`
    arrived: torch.cuda.Event | None

    def result(self) -> StepDone:
        """Waits for the GPU. RuntimeError when it failed, which is fatal to the process; damaged weights are not."""
        if self.arrived is not None:
            self.arrived.synchronize()
        try:
            sampled = () if self.drawn is None else self.drawn.sampled(self.sequences, self.states)
        except DamagedModelError as error:
            return StepDone(self.step.step, self.step.group_id, (), time.perf_counter() - self.began, str(error), damaged=True)
        return StepDone(self.step.step, self.step.group_id, sampled, time.perf_counter() - self.began)


@dataclass(frozen=True)
class WakeUnderWay:
    memory: ParkedMemory
    transfer: Transfer

    def wait(self, timeout_s: float) -> None:
        """Return once the weights are there. When they do not come, KV and workspace are given back too: it stays parked."""
        try:
            self.transfer.wait(timeout_s)
        except RuntimeError:
            self.memory.give_up_wake()
            raise


class GpuShard:
    """Used by one thread at a time, which need not be the one that loaded it."""

    def __init__(
        self,
        command: LoadShard,
        facts: ShardFacts,
        stage: StageModel,
        memory: FixedMemory,
        comm: GroupComm,
        sequences: SequenceTable,
        newest: torch.Tensor,
        eager: EagerSteps,
        graphs: GraphSteps | None,
        stream: torch.cuda.Stream | None,
        extra_bytes: int,
        constraints: Constraints | None,
    ) -> None:
        """`newest`: the newest token of every sequence. `extra_bytes`: taken outside the arena when it was loaded (graphs).
        `constraints`: of a rank of the last stage."""
        self._command = command
        self._facts = facts
        self._stage = stage
        self._memory = memory
        self._comm = comm
        self._sequences = sequences
        self._newest = newest
        self._eager = eager
        self._graphs = graphs
        self._stream = stream  # None: not on a GPU
        self._extra_bytes = extra_bytes
        self._constraints = constraints
        self._last: torch.cuda.Event | None = None

    def held(self) -> HeldShard:
        command, facts, memory = self._command, self._facts, self._memory
        return HeldShard(
            group_id=command.group_id,
            model=command.model,
            spec_json=command.spec_json,
            ranks=command.ranks,
            tensor_parallel=command.tensor_parallel,
            pipeline_parallel=command.pipeline_parallel,
            kv_blocks=memory.kv.blocks,
            kv_ceiling_blocks=command.kv_ceiling_blocks,
            kv_block_tokens=command.kv_block_tokens,
            bytes={
                "weights": memory.weights.committed_bytes,
                "kv": memory.kv.committed_bytes,
                "workspace": memory.workspace_bytes + self._extra_bytes,
                "communication": self._comm.taken_bytes,
            },
            digest=facts.digest,
            precision=facts.precision,
            context=facts.context,
            disk_bytes=facts.disk_bytes,
            **self._standing_by(),
        )

    def _standing_by(self) -> dict[str, Any]:
        """What `held` says of parking."""
        memory = self._memory
        if not isinstance(memory, ParkedMemory):
            return {}
        said: dict[str, Any] = {"parkable": True, "parked": memory.is_parked, "standby_bytes": memory.parked_bytes}
        if memory.is_parked:
            # Graphs stay, so what a wake takes comes on top of them.
            taken = memory.awake_bytes
            said["wake_bytes"] = {**taken, "workspace": taken["workspace"] + self._extra_bytes}
        return said

    # ---------------------------------------------------------------- steps

    def begin(self, step: Step) -> PendingStep | None:
        """Enqueue. None on ranks that report nothing. ValueError when the step contradicts what this rank knows."""
        began = time.perf_counter()
        memory = self._memory
        if step.sequences and isinstance(memory, ParkedMemory) and memory.is_parked:
            raise ValueError(f"model `{self._command.model}` is parked; wake it before its next step")
        parts = self._sequences.prepare(step, memory.kv.blocks, memory.kv.block_tokens)
        sequences = [part.sequence for part in parts if part.state is not None]
        states = [part.state for part in parts if part.state is not None]
        with torch.inference_mode(), self._on_stream():
            drawn = self._enqueue(parts, states) if parts else None
            reports = self._stage.is_last and not self._comm.tensor_rank
            on_host = None if drawn is None or not reports else _to_host(drawn)
            self._last = self._point()
        return PendingStep(step, began, sequences, states, on_host, self._last) if reports else None

    def step(self, step: Step) -> StepDone | None:
        pending = self.begin(step)
        return None if pending is None else pending.result()

    def _enqueue(self, parts: list[Part], states: list[DrawState]) -> Drawn | None:
        waking = self._before_layer()
        if waking is None and self._graphs is not None and self._graphs.fits(parts):
            computed = self._graphs.run(parts)
        else:
            computed = self._eager.run(parts, waking)
        if computed is None:
            return None
        drawn = draw(computed.logits, computed.greedy, states)
        if drawn.tokens is not computed.greedy:
            places = [part.place for part in parts if part.state is not None]
            at = torch.tensor(places, pin_memory=self._newest.is_cuda).to(self._newest.device, non_blocking=True)
            self._newest.index_copy_(0, at, drawn.tokens.int())
        return drawn

    def _before_layer(self) -> BeforeLayer | None:
        """While weights come in: let each layer wait for its own."""
        memory, stream = self._memory, self._stream
        if not isinstance(memory, ParkedMemory) or stream is None:
            return None
        if memory.wake_under_way is None:
            return None
        return lambda layer: memory.wait(layer, stream)

    def constrain(self, sequence: int, json_schema: str) -> Callable[[], int]:
        if self._constraints is None:
            raise ValueError(f"this rank of model `{self._command.model}` does not sample")
        compile_it = self._constraints.prepare(sequence, json_schema)

        def work() -> int:
            compile_it()
            return 0  # it is in host memory, and the pool's is the card's

        return work

    def forget_constraint(self, sequence: int | None) -> None:
        if self._constraints is not None:
            self._constraints.forget(sequence)

    # ---------------------------------------------------------------- memory

    def grow_kv(self, blocks: int) -> None:
        if blocks < self._memory.kv.blocks:
            self._settle()
        self._memory.kv.grow(blocks)

    def save(self) -> None:
        """Have the copy that `park` needs. On any thread, beside steps. MemoryError when host memory does not suffice."""
        saving = self._parked_memory().save()
        if saving is not None:
            saving.wait(WAIT_S)

    def drop_copy(self) -> None:
        """Give the copy of weights that are in memory up; host memory for another."""
        self._parked_memory().drop_copies()

    def park(self) -> None:
        """Give weights, KV and workspace back; graphs stay. ValueError while sequences are known (rule 5)."""
        memory = self._parked_memory()
        if len(self._sequences):
            raise ValueError(f"model `{self._command.model}` has {len(self._sequences)} sequences and cannot be parked")
        self._settle()
        memory.park()

    def wake(self, blocks: int) -> WakeUnderWay:
        """Begin to bring the weights back, with `blocks` KV blocks. MemoryError changes nothing.

        Steps may follow at once: they wait for their layers one by one, which holds up whoever shares this thread; where others
        have steps to compute, let the transfer end first.
        """
        memory = self._parked_memory()
        return WakeUnderWay(memory, memory.wake(blocks))

    def close(self) -> None:
        self._settle()
        if self._graphs is not None:
            self._graphs.close()
        self._memory.close()

    def _parked_memory(self) -> ParkedMemory:
        if not isinstance(self._memory, ParkedMemory):
            raise ValueError(f"model `{self._command.model}` cannot be parked: its rank has no parking space")
        return self._memory

    def _settle(self) -> None:
        """Wait until the GPU has done what this shard enqueued."""
        if self._last is not None:
            self._last.synchronize()

    def _point(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def _to_host(drawn: Drawn) -> Drawn:
    """Copies are enqueued; they are good once a later event of the stream has been reached."""
    found = drawn.log_probabilities
    if found is not None:
        found = LogProbabilities(found.rows, _copy(found.chosen), _copy(found.ids), _copy(found.values))
    return Drawn(_copy(drawn.tokens), _copy(drawn.largest), found)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
