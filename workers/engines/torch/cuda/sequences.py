"""What a shard remembers on the host of the sequences in flight. Their newest tokens are on the GPU, one place a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workers.engines.torch.constraint import Constraints
from workers.engines.torch.cuda.batch import Span
from workers.engines.torch.cuda.draw import DrawState
from workers.messages import SequenceStep, Step


@dataclass
class _Sequence:
    place: int  # of its newest token
    state: DrawState
    table: np.ndarray  # KV block ids, int32
    has_sample: bool = False


@dataclass(frozen=True)
class Part:
    """One sequence's part of a step."""

    sequence: int
    tokens: tuple[int, ...]  # empty: the newest token, which is on the GPU
    span: Span
    place: int
    state: DrawState | None  # None: nothing is sampled


class SequenceTable:
    """For at most `places` sequences at once."""

    def __init__(self, places: int, vocabulary: int, device: torch.device, constraints: Constraints | None = None) -> None:
        """`constraints`: on ranks that sample."""
        self._constraints = constraints
        self._sequences: dict[int, _Sequence] = {}
        self._free = list(range(places - 1, -1, -1))
        self._vocabulary = vocabulary
        self._device = device

    def __len__(self) -> int:
        return len(self._sequences)

    def prepare(self, step: Step, blocks: int, block_tokens: int) -> list[Part]:
        """Apply what the step says; its parts, those of one token first. Blocks 0..blocks-1 may be used.

        ValueError when it contradicts what this rank knows.
        """
        for sequence in step.released:
            gone = self._sequences.pop(sequence, None)
            if gone is not None:
                self._free.append(gone.place)
        parts = [self._part(part, blocks, block_tokens) for part in step.sequences]
        return sorted(parts, key=lambda part: part.span.count > 1)

    def _part(self, part: SequenceStep, blocks: int, block_tokens: int) -> Part:
        sequence = self._sequences.get(part.sequence)
        if part.new is not None:
            place = self._place() if sequence is None else sequence.place
            state = DrawState.start(part.new, self._vocabulary, self._device)
            if part.new.constrained and self._constraints is not None:
                state.constraint = self._constraints.begin(part.sequence, part.new.generated)
            sequence = self._sequences[part.sequence] = _Sequence(place, state, np.empty(0, np.int32))
        elif sequence is None:
            raise ValueError(f"sequence {part.sequence} is not known on this rank; its first step must describe it")
        if part.new_blocks:
            if max(part.new_blocks) >= blocks or min(part.new_blocks) < 0:
                raise ValueError(f"sequence {part.sequence} was given block {max(part.new_blocks)} of {blocks} mapped ones")
            sequence.table = np.concatenate((sequence.table, np.array(part.new_blocks, dtype=np.int32)))
        if not part.tokens and not sequence.has_sample:
            raise ValueError(f"sequence {part.sequence} has no last sample on this rank; its step must carry the token")
        if sequence.state.constraint is not None and sequence.has_sample:
            if not part.tokens:
                raise ValueError(f"sequence {part.sequence} follows a JSON schema; its step must carry the token")
            sequence.state.constraint.advance(part.tokens)
        count = max(len(part.tokens), 1)
        if part.start + count > len(sequence.table) * block_tokens:
            raise ValueError(
                f"sequence {part.sequence} has {len(sequence.table)} blocks of {block_tokens} tokens, "
                f"too few for positions up to {part.start + count - 1}"
            )
        if part.sample:
            sequence.has_sample = True
        span = Span(count, part.start, sequence.table)
        return Part(part.sequence, part.tokens, span, sequence.place, sequence.state if part.sample else None)

    def _place(self) -> int:
        if not self._free:
            raise ValueError(f"{len(self._sequences)} sequences are known on this rank, it has no place for another one")
        return self._free.pop()
