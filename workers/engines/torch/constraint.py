"""Answers held to a JSON schema: before a token is chosen, those that the schema forbids here are taken out.

Every rank that samples keeps its own state, moved by the tokens that the driver says were chosen, so all choose alike. A schema
is compiled on a thread beside the steps; its sequence comes into a step when all ranks have said that they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gateway.api.checkpoint import Checkpoint, tokenizer_dir
from gateway.api.json_grammar import GrammarTokenizer, grammar_tokenizer, matcher, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Constraint:
    """Of one sequence."""

    def __init__(self, state: LLMatcher, generated: Sequence[int] = ()) -> None:
        """`generated`: the answer so far, when it goes on after a preemption."""
        self._state = state
        self.error = ""  # why its answer cannot go on; other sequences are not concerned
        self.advance(generated)

    def advance(self, tokens: Sequence[int]) -> None:
        """They were chosen."""
        if tokens:
            self._state.consume_tokens(list(tokens))

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        """[vocabulary] of bool. None: nothing can follow, and `error` says why."""
        packed = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(packed, bitorder="little")[:vocabulary].view(bool)
        if self._state.is_error() or not known.any():
            why = reason(self._state.get_error()) or "no token is allowed"
            self.error = f"the answer cannot follow its JSON schema any further: {why}"
            return None
        return np.pad(known, (0, vocabulary - len(known)))


@dataclass(slots=True)
class _Compiling:
    state: LLMatcher | None = None


class Constraints:
    """Of one shard that samples: the schemas of the sequences that come next. The tokenizer is made when the first one comes."""

    def __init__(self, load: Callable[[], GrammarTokenizer]) -> None:
        self._load = load
        self._tokenizer: GrammarTokenizer | None = None
        self._compiling: dict[int, _Compiling] = {}

    @property
    def size_bytes(self) -> int:
        return 0 if self._tokenizer is None else self._tokenizer.size_bytes

    def prepare(self, sequence: int, schema: str) -> Callable[[], int]:
        """What compiles it, on one other thread before the sequence begins, and gives `size_bytes`. ValueError: it cannot."""
        compiling = self._compiling[sequence] = _Compiling()

        def work() -> int:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            compiling.state = matcher(self._tokenizer, schema)
            return self.size_bytes

        return work

    def forget(self, sequence: int | None) -> None:
        """It does not begin; None: none of them does."""
        if sequence is None:
            self._compiling.clear()
        else:
            self._compiling.pop(sequence, None)

    def begin(self, sequence: int, generated: Sequence[int]) -> Constraint:
        """ValueError when its schema was not compiled."""
        compiled = self._compiling.pop(sequence, None)
        if compiled is None or compiled.state is None:
            raise ValueError(f"sequence {sequence} follows a JSON schema that this rank has not compiled")
        return Constraint(compiled.state, generated)


def constraints_of(checkpoint: Checkpoint, cache_dir: Path) -> Constraints:
    return Constraints(lambda: grammar_tokenizer(tokenizer_dir(checkpoint, cache_dir), checkpoint.eos_ids))
