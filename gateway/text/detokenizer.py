"""Turns token ids into text as they come, without ever giving half a character (rule 17)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from gateway.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
# A run of ids that decodes to an unfinished character is held; no character needs more byte tokens than this.
LONGEST_CHARACTER_TOKENS = 8


class Detokenizer(Protocol):
    """Stateful, one per choice. The concatenation of what `feed` and `finish` return does not depend on the chunking."""

    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What is still held. The beginning of a character that never came is dropped: it is no text."""
        ...


class ByteDetokenizer:
    """For tokenizers where each token is some bytes: look them up, let an incremental UTF-8 decoder hold what is unfinished."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        return self._decoder.decode(table[ids[0]] if len(ids) == 1 else b"".join([table[token] for token in ids]))

    def finish(self) -> str:
        self._decoder.reset()
        return ""


class RingDetokenizer:
    """For all other tokenizers: decode a short run of ids twice, with and without the new ones, and give the difference.

    The run is [context .. pending]: `context` are ids whose text was given already and which only make the decoder treat the
    next one as a continuation (spaces, suffixes); `pending` are ids whose text ends in an unfinished character.
    Ids are taken one at a time, so the result cannot depend on how they were chunked.
    """

    __slots__ = ("_context", "_context_text", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_tail)
        self._context_text = tokenizer.decode(self._context) if self._context else ""
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._take(token) for token in ids])

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)[len(self._context_text) :]
        written = REPLACEMENT in (self._tokenizer.id_to_token(self._pending[-1]) or "")  # the model wrote U+FFFD itself
        self._pending = []
        return text if written else text.rstrip(REPLACEMENT)

    def _take(self, token: int) -> str:
        self._pending.append(token)
        text = self._tokenizer.decode(self._context + self._pending)
        unfinished = text.endswith(REPLACEMENT) and len(self._pending) < LONGEST_CHARACTER_TOKENS
        if len(text) <= len(self._context_text) or unfinished:
            return ""
        new = text[len(self._context_text) :]
        self._context = self._pending
        self._context_text = self._tokenizer.decode(self._context)
        self._pending = []
        return new
