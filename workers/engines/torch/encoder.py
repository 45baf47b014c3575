"""Encoders: a text goes in whole, one vector comes out. They keep no keys and values and write no tokens.

They live in a worker group like every model (ledger, loading, parking, steps, canary), so the driver need not know of them. What
they answer as a token is the largest component of the vector, which is what a canary compares (rule 8).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from gateway.api.checkpoint import Checkpoint
from gateway.api.checkpoint.pooling import Pooling, first_position, read_pooling
from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from workers.engines.base import ProgressFn
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.shard import ShardFacts
from workers.engines.torch.source import weight_source
from workers.engines.torch.standby import CopyBack, HostCopy
from workers.memory.arena import Arena
from workers.messages import HeldShard, LoadShard, SampledToken, SequenceStep, Step, StepDone

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.bfloat16}
_PADDED_SHARE = 0.25
"""Texts are computed together while padding is at most this share of what is computed."""


def load_encoder(
    command: LoadShard, spec: ModelSpec, checkpoint: Checkpoint, cache_dir: Path, arena: Arena, progress: ProgressFn
) -> EncoderShard:
    """YardError(INVALID) for a precision that encoders do not have here; MemoryError when the budget does not suffice."""
    precision = checkpoint.precision if spec.precision == "auto" else spec.precision
    if precision not in _DTYPES:
        raise invalid(f"precision {precision} is not one of an encoder on CPU: {', '.join(_DTYPES)}", field="precision")
    dtype = _DTYPES[precision]
    model = _empty_model(checkpoint.config, dtype)
    source = weight_source(
        checkpoint, model.base_model_prefix, cache_dir, lambda done, what, note="": progress(done / 2, what, note)
    )
    shape = checkpoint.shape
    elements = sum(parameter.numel() for parameter in model.parameters())
    with ExitStack() as undo:
        prefix = f"{command.group_id}:{command.model}"
        # Alignment takes at most as much again for small tensors.
        weights = TensorRegion(arena, f"{prefix}:weights", elements * 8, command.budget.get("weights"))
        undo.callback(weights.close)
        _fill(model, source, weights, dtype, progress)
        rows = spec.limits.batch_tokens * (6 * shape.hidden + 3 * shape.intermediate) * dtype.itemsize
        workspace = TensorRegion(arena, f"{prefix}:workspace", rows, command.budget.get("workspace"))
        undo.callback(workspace.close)
        workspace.empty(torch.uint8, (rows,))
        undo.pop_all()
    context = min(spec.context or checkpoint.max_context, checkpoint.max_context)
    facts = ShardFacts(checkpoint.digest, precision, context, source.read_bytes)
    progress(1.0, "ready")
    pooling = read_pooling(checkpoint.path) if checkpoint.path.is_dir() else Pooling()
    pad = int(checkpoint.config.get("pad_token_id") or 0)
    return EncoderShard(command, facts, model, pooling, weights, workspace, pad, first_position(checkpoint.config))


def _empty_model(content: dict[str, Any], dtype: torch.dtype) -> Any:
    config = AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa", add_pooling_layer=False)
    for module in model.modules():  # tables that have values although nothing is loaded
        for name, buffer in module.named_buffers(recurse=False):
            values = (
                torch.arange(buffer.shape[-1]) if name == "position_ids" else torch.zeros(buffer.shape[-1], dtype=torch.int64)
            )
            setattr(module, name, values.expand(buffer.shape))
    return model.eval().requires_grad_(False)


def _fill(model: Any, source: Any, weights: TensorRegion, dtype: torch.dtype, progress: ProgressFn) -> None:
    parameters = [
        (module, name, path) for path, module in model.named_modules() for name, _ in module.named_parameters(recurse=False)
    ]
    for done, (module, name, path) in enumerate(parameters, start=1):
        stored = source.dense(f"{model.base_model_prefix}.{path}.{name}")
        setattr(module, name, nn.Parameter(weights.copy(stored.to(dtype)), requires_grad=False))
        progress(0.5 + done / len(parameters) / 2, "loading weights")


class EncoderShard:
    """A `ParkableShard`. Chunks of a prompt are collected, and the whole is computed when its last one has come."""

    def __init__(
        self,
        command: LoadShard,
        facts: ShardFacts,
        model: Any,
        pooling: Pooling,
        weights: TensorRegion,
        workspace: TensorRegion,
        pad_id: int,
        first_position: int,
    ) -> None:
        self._command = command
        self._facts = facts
        self._model = model
        self._pooling = pooling
        self._weights = weights
        self._workspace = workspace
        self._pad_id = pad_id
        self._vocabulary: int = model.config.vocab_size
        self._first_position = first_position
        self._texts: dict[int, list[int]] = {}
        self._kv_blocks = command.kv_floor_blocks
        self._standby: HostCopy | None = None
        self._parked = False
        self._awake_bytes: dict[str, int] = {}

    def held(self) -> HeldShard:
        command, facts = self._command, self._facts
        return HeldShard(
            group_id=command.group_id,
            model=command.model,
            spec_json=command.spec_json,
            ranks=command.ranks,
            tensor_parallel=command.tensor_parallel,
            pipeline_parallel=command.pipeline_parallel,
            kv_blocks=self._kv_blocks,
            kv_ceiling_blocks=command.kv_ceiling_blocks,
            kv_block_tokens=command.kv_block_tokens,
            bytes={"weights": self._weights.committed_bytes, "workspace": self._workspace.committed_bytes},
            digest=facts.digest,
            precision=facts.precision,
            context=facts.context,
            disk_bytes=facts.disk_bytes,
            parkable=True,
            parked=self._parked,
            standby_bytes=self._standby.size_bytes if self._standby else 0,
            wake_bytes=dict(self._awake_bytes),
        )

    def step(self, step: Step) -> StepDone:
        """ValueError when the step contradicts what this rank knows; nothing was computed then."""
        started = time.perf_counter()
        for sequence in step.released:
            self._texts.pop(sequence, None)
        whole = [part.sequence for part in step.sequences if self._take(part)]
        with torch.inference_mode():
            vectors = self._vectors([self._texts[sequence] for sequence in whole])
        sampled = tuple(
            SampledToken(
                sequence, int(vector.abs().argmax()) % self._vocabulary, embedding=vector.numpy().astype("<f4").tobytes()
            )
            for sequence, vector in zip(whole, vectors, strict=True)
        )
        for token in sampled:
            self._texts[token.sequence].append(token.token)
        return StepDone(step.step, step.group_id, sampled, time.perf_counter() - started)

    def _take(self, part: SequenceStep) -> bool:
        """True when the text is complete."""
        if part.new is not None:
            self._texts[part.sequence] = []
        text = self._texts.get(part.sequence)
        if text is None:
            raise ValueError(f"sequence {part.sequence} is not known on this rank; its first step must describe it")
        if part.start > len(text):
            raise ValueError(f"sequence {part.sequence} goes on at token {part.start} and has {len(text)}")
        if part.tokens:
            text[part.start :] = part.tokens
        return part.sample

    def _vectors(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """[hidden] in fp32 each, in the order of the texts."""
        found: dict[int, torch.Tensor] = {}
        for batch in _batches([len(text) for text in texts]):
            longest = max(len(texts[index]) for index in batch)
            ids = torch.full((len(batch), longest), self._pad_id)
            mask = torch.zeros((len(batch), longest), dtype=torch.int64)
            for row, index in enumerate(batch):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            positions = (torch.arange(longest) + self._first_position).expand(len(batch), longest)
            hidden = self._model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
            found.update(zip(batch, self._pooled(hidden.float(), mask), strict=True))
        return [found[index] for index in range(len(texts))]

    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[texts, tokens, hidden] → [texts, hidden]"""
        real = mask.unsqueeze(-1)
        match self._pooling.mode:
            case "mean":
                vectors = (hidden * real).sum(1) / real.sum(1)
            case "max":
                vectors = hidden.masked_fill(real == 0, float("-inf")).amax(1)
            case "cls":
                vectors = hidden[:, 0]
            case "last":
                vectors = hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
        return nn.functional.normalize(vectors, dim=-1) if self._pooling.normalize else vectors

    def grow_kv(self, blocks: int) -> None:
        """Blocks only count what may be in flight."""
        self._kv_blocks = blocks

    # ------------------------------------------------------------------ residency

    def save(self) -> None:
        if self._standby is None:
            self._standby = HostCopy(self._weights)

    def drop_copy(self) -> None:
        if not self._parked:
            self._standby = None

    def park(self) -> None:
        if self._texts:
            raise ValueError(f"model `{self._command.model}` has {len(self._texts)} texts and cannot be parked")
        self.save()
        self._awake_bytes = {"weights": self._weights.committed_bytes, "workspace": self._workspace.committed_bytes}
        self._commit({})
        self._parked, self._kv_blocks = True, 0

    def wake(self, blocks: int) -> CopyBack:
        assert self._standby is not None, "wake without park"
        try:
            self._commit(self._awake_bytes)
        except MemoryError:
            self._commit({})
            raise
        self._kv_blocks = blocks
        return CopyBack(self._standby, f"wake-{self._command.model}", self._woken)

    def _woken(self) -> None:
        self._parked, self._standby, self._awake_bytes = False, None, {}

    def _commit(self, sizes: dict[str, int]) -> None:
        self._weights.region.commit(sizes.get("weights", 0))
        self._workspace.region.commit(sizes.get("workspace", 0))

    def close(self) -> None:
        self._standby = None
        self._workspace.close()
        self._weights.close()


def _batches(lengths: list[int]) -> list[list[int]]:
    """Indices by length, so that little is padded."""
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        if batches and (tokens + length) >= (1 - _PADDED_SHARE) * length * (len(batches[-1]) + 1):
            batches[-1].append(index)
            tokens += length
        else:
            batches.append([index])
            tokens = length
    return batches
