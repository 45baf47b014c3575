"""What a shard remembers of the sequences in flight, and a step's part of each as arrays for the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from workers.engines.torch.attention import AttentionBatch, Span
from workers.engines.torch.constraint import Constraints
from workers.engines.torch.kv import PagedKv
from workers.engines.torch.sampler import SampleState
from workers.messages import SequenceStep, Step


@dataclass
class _Sequence:
    table: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    last_token: int = -1
    sampled: bool = False  # since it was introduced: what comes now was sampled
    state: SampleState | None = None


@dataclass(frozen=True)
class StepInputs:
    tokens: torch.Tensor  # [1, tokens] ids
    positions: torch.Tensor  # [1, tokens]
    attention: AttentionBatch
    sample_rows: torch.Tensor  # indices into the tokens
    sample_sequences: list[int]
    sample_states: list[SampleState]


class SequenceTable:
    def __init__(self, constraints: Constraints | None = None) -> None:
        """`constraints`: on ranks that sample."""
        self._constraints = constraints
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def prepare(self, step: Step, kv: PagedKv, dtype: torch.dtype) -> StepInputs | None:
        """Apply what the step says of its sequences. None when it only releases some.

        ValueError when it contradicts what this rank knows.
        """
        for sequence in step.released:
            self._sequences.pop(sequence, None)
        if not step.sequences:
            return None
        parts = [self._part(part, kv) for part in step.sequences]
        # Decodes first, by length: what attention groups together lies together.
        order = sorted(range(len(parts)), key=lambda i: (len(parts[i][1]) > 1, parts[i][0].start))
        ids: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        sampled: list[int] = []
        states: list[SampleState] = []
        for i in order:
            part, tokens, sequence = parts[i]
            spans.append(Span(len(ids), len(tokens), part.start, sequence.table))
            ids.extend(tokens)
            if part.sample and sequence.state is not None:
                rows.append(len(ids) - 1)
                sampled.append(part.sequence)
                states.append(sequence.state)
        decodes = [span for span in spans if span.count == 1]
        positions, blocks, offsets = _places(spans, kv.block_tokens)
        return StepInputs(
            tokens=torch.tensor([ids]),
            positions=torch.from_numpy(positions).unsqueeze(0),
            attention=AttentionBatch(
                kv, decodes, spans[len(decodes) :], dtype, torch.from_numpy(blocks), torch.from_numpy(offsets)
            ),
            sample_rows=torch.tensor(rows, dtype=torch.int64),
            sample_sequences=sampled,
            sample_states=states,
        )

    def remember(self, sequence: int, token: int) -> None:
        self._sequences[sequence].last_token = token

    def _part(self, part: SequenceStep, kv: PagedKv) -> tuple[SequenceStep, tuple[int, ...], _Sequence]:
        sequence = self._sequences.get(part.sequence)
        if part.new is not None:
            state = SampleState.start(part.new)
            if part.new.constrained and self._constraints is not None:
                state.constraint = self._constraints.begin(part.sequence, part.new.generated)
            sequence = self._sequences[part.sequence] = _Sequence(state=state)
        elif sequence is None:
            raise ValueError(f"sequence {part.sequence} is not known on this rank; its first step must describe it")
        if part.new_blocks:
            if max(part.new_blocks) >= kv.blocks or min(part.new_blocks) < 0:
                raise ValueError(f"sequence {part.sequence} was given block {max(part.new_blocks)} of {kv.blocks} mapped ones")
            sequence.table = np.concatenate((sequence.table, np.array(part.new_blocks, dtype=np.int64)))
        tokens = part.tokens or (sequence.last_token,)
        if sequence.sampled and sequence.state is not None and sequence.state.constraint is not None:
            sequence.state.constraint.advance(tokens)
        sequence.sampled |= part.sample
        if tokens[0] < 0:
            raise ValueError(f"sequence {part.sequence} has no last sample on this rank; its step must carry the token")
        if part.start + len(tokens) > len(sequence.table) * kv.block_tokens:
            raise ValueError(
                f"sequence {part.sequence} has {len(sequence.table)} blocks of {kv.block_tokens} tokens, "
                f"too few for positions up to {part.start + len(tokens) - 1}"
            )
        return part, tokens, sequence


def _places(spans: list[Span], block_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(position, KV block, offset in the block) of every token of the step."""
    if all(span.count == 1 for span in spans):
        positions = np.array([span.start for span in spans], dtype=np.int64)
        blocks = np.array([span.table[span.start // block_tokens] for span in spans], dtype=np.int64)
        return positions, blocks, positions % block_tokens
    positions = np.concatenate([np.arange(span.start, span.length, dtype=np.int64) for span in spans])
    blocks = np.concatenate([span.table[np.arange(span.start, span.length) // block_tokens] for span in spans])
    return positions, blocks, positions % block_tokens
