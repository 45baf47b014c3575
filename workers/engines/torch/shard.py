"""One rank's part of one worker group, computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.comm.base import GroupComm
from workers.engines.torch.attention import BatchHolder
from workers.engines.torch.constraint import Constraints
from workers.engines.torch.head import RescoredHead
from workers.engines.torch.kv import PagedKv
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.sampler import argmax, sample
from workers.engines.torch.sequences import SequenceTable, StepInputs
from workers.engines.torch.stage import StageModel
from workers.engines.torch.standby import CopyBack, HostCopy
from workers.engines.torch.threads import ComputeThreads
from workers.messages import HeldShard, LoadShard, SampledToken, Step, StepDone


@dataclass(frozen=True)
class ShardFacts:
    digest: str
    precision: str
    context: int
    disk_bytes: int


class TorchShard:
    def __init__(
        self,
        command: LoadShard,
        facts: ShardFacts,
        stage: StageModel,
        holder: BatchHolder,
        weights: TensorRegion,
        workspace: TensorRegion,
        kv: PagedKv,
        comm: GroupComm,
        compute: torch.dtype,
        threads: ComputeThreads,
        constraints: Constraints | None,
    ) -> None:
        """`constraints`: of a rank of the last stage."""
        self._command = command
        self._facts = facts
        self._stage = stage
        self._model: Any = stage.model
        self._embedding: Any = stage.model.get_input_embeddings()
        self._holder = holder
        self._weights = weights
        self._workspace = workspace
        self._kv = kv
        self._comm = comm
        self._compute = compute
        self._threads = threads
        self._constraints = constraints
        self._sequences = SequenceTable(constraints)
        self._standby: HostCopy | None = None
        self._parked = False
        self._awake_bytes: dict[str, int] = {}  # by kind, beside KV, while it is parked
        self._hidden = stage.base.config.hidden_size
        self._softcap: float | None = getattr(stage.model.config, "final_logit_softcapping", None)

    def held(self) -> HeldShard:
        command, facts = self._command, self._facts
        return HeldShard(
            group_id=command.group_id,
            model=command.model,
            spec_json=command.spec_json,
            ranks=command.ranks,
            tensor_parallel=command.tensor_parallel,
            pipeline_parallel=command.pipeline_parallel,
            kv_blocks=self._kv.blocks,
            kv_ceiling_blocks=command.kv_ceiling_blocks,
            kv_block_tokens=command.kv_block_tokens,
            bytes={
                "weights": self._weights.committed_bytes,
                "kv": self._kv.committed_bytes,
                "workspace": self._workspace.committed_bytes,
                **({"grammar": self._constraints.size_bytes} if self._constraints and self._constraints.size_bytes else {}),
            },
            digest=facts.digest,
            precision=facts.precision,
            context=facts.context,
            disk_bytes=facts.disk_bytes,
            parkable=True,
            parked=self._parked,
            standby_bytes=self._standby.size_bytes if self._standby else 0,
            wake_bytes=dict(self._awake_bytes),
        )

    def step(self, step: Step) -> StepDone | None:
        """ValueError when the step contradicts what this rank knows; nothing was computed or sent then."""
        started = time.perf_counter()
        self._threads.use()
        with torch.inference_mode():
            inputs = self._sequences.prepare(step, self._kv, self._compute)
            sampled = self._compute_step(inputs) if inputs else ()
        if not self._stage.is_last:
            return None
        for one in sampled:
            self._sequences.remember(one.sequence, one.token)
        if self._comm.tensor_rank:
            return None
        return StepDone(step.step, step.group_id, sampled, time.perf_counter() - started)

    def _compute_step(self, inputs: StepInputs) -> tuple[SampledToken, ...]:
        self._holder.current = inputs.attention
        try:
            hidden = self._forward(inputs)
        finally:
            self._holder.current = None
        if not self._stage.is_last:
            self._comm.send_next(hidden)
            return ()
        if not inputs.sample_sequences:
            return ()
        # Every shard of the last stage samples, from the same logits, so that each knows its own last token.
        rows = hidden[0].index_select(0, inputs.sample_rows)
        return sample(self, rows, inputs.sample_sequences, inputs.sample_states)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states after this stage's layers, [1, tokens, hidden]."""
        stage = self._stage
        if stage.is_first:
            hidden = self._embedding(inputs.tokens)
        else:
            hidden = torch.empty((1, inputs.tokens.shape[1], self._hidden), dtype=self._compute)
            self._comm.recv_previous(hidden)
        return stage.base(inputs_embeds=hidden, position_ids=inputs.positions, use_cache=False).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.lm_head(hidden).float()
        softcap = self._softcap
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    @property
    def vocabulary(self) -> int:
        return self._model.config.vocab_size

    def argmax(self, hidden: torch.Tensor, noise: Sequence[torch.Tensor | None]) -> list[int]:
        head = self._model.lm_head
        noisy = any(added is not None for added in noise)
        if isinstance(head, RescoredHead) and not (noisy and self._softcap):
            return head.argmax(hidden, noise)
        # A softcap does not change the order, except of noisy logits.
        return argmax(self.logits(hidden) if noisy else head(hidden), noise)

    def constrain(self, sequence: int, json_schema: str) -> Callable[[], int]:
        if self._constraints is None:
            raise ValueError(f"this rank of model `{self._command.model}` does not sample")
        return self._constraints.prepare(sequence, json_schema)

    def forget_constraint(self, sequence: int | None) -> None:
        if self._constraints is not None:
            self._constraints.forget(sequence)

    def set_threads(self, count: int) -> None:
        """From the next step on."""
        self._threads.set(count)

    def grow_kv(self, blocks: int) -> None:
        self._kv.grow(blocks)

    # ------------------------------------------------------------------ residency

    def save(self) -> None:
        if self._standby is None:
            self._standby = HostCopy(self._weights)

    def drop_copy(self) -> None:
        if not self._parked:
            self._standby = None

    def park(self) -> None:
        if len(self._sequences):
            raise ValueError(f"model `{self._command.model}` has {len(self._sequences)} sequences and cannot be parked")
        self.save()
        self._awake_bytes = {"weights": self._weights.committed_bytes, "workspace": self._workspace.committed_bytes}
        self._kv.grow(0)
        self._workspace.region.commit(0)
        self._weights.region.commit(0)
        self._parked = True

    def wake(self, blocks: int) -> CopyBack:
        assert self._standby is not None, "wake without park"
        try:
            self._weights.region.commit(self._awake_bytes["weights"])
            self._workspace.region.commit(self._awake_bytes["workspace"])
            self._kv.grow(blocks)
        except MemoryError:
            self._kv.grow(0)
            self._workspace.region.commit(0)
            self._weights.region.commit(0)
            raise
        return CopyBack(self._standby, f"wake-{self._command.model}", self._woken)

    def _woken(self) -> None:
        self._parked, self._standby, self._awake_bytes = False, None, {}

    def close(self) -> None:
        self._standby = None
        self._kv.close()
        self._workspace.close()
        self._weights.close()
