"""JSON schemas as grammars over a model's tokens, by llguidance. Gateways check them first, ranks mask logits with them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from gateway.api.errors import shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions, LLParserLimits

# Without this a model may write blanks for ever; these are the separators that models and json.dumps write.
_LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MOST_LEXER_STATES = 20_000
"""Of one answer, 1 to 2 kB each; real schemas need less than 2,000. The library's own limits bound what a token takes to 20 ms.
They do not bound what a grammar takes, so gateways try that first (`gateway/text/schema_check.py`)."""
BYTES_A_TOKEN = 850
"""Of a vocabulary in memory: 29 to 42 MB were measured for the 49,152 tokens of SmolLM2."""


class GrammarTokenizer:
    """A model's tokens as the library reads them. Made by `grammar_tokenizer`."""

    def __init__(self, of: LLTokenizer) -> None:
        self.of = of
        self.size_bytes = of.vocab_size * BYTES_A_TOKEN


_known: WeakValueDictionary[tuple[bytes, tuple[int, ...]], GrammarTokenizer] = WeakValueDictionary()
_making = threading.Lock()


def grammar_tokenizer(directory: Path, eos_ids: Sequence[int]) -> GrammarTokenizer:
    """Of a directory with tokenizer.json: one of each content in a process, for as long as somebody has it.

    Takes some tenths of a second the first time, for which reason it is not called where others wait.
    """
    from llguidance import LLTokenizer

    with _making:
        source = (directory / "tokenizer.json").read_bytes()
        key = (hashlib.sha256(source).digest(), tuple(sorted(eos_ids)))
        if (known := _known.get(key)) is not None:
            return known
        tokenizer = Tokenizer.from_buffer(source)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        made = _known[key] = GrammarTokenizer(LLTokenizer(tokenizer.to_str(), eos_token=list(key[1])))
        return made


def matcher(tokenizer: GrammarTokenizer, schema: str) -> LLMatcher:
    """At the beginning of an answer. ValueError says why the schema cannot be used."""
    from llguidance import LLMatcher

    made = LLMatcher(tokenizer.of, LLMatcher.grammar_from_json_schema(schema, defaults=_LAYOUT), log_level=0, limits=_limits())
    made.compute_bitmask()  # what the first token needs of the lexer is made here
    if made.is_error():
        raise ValueError(reason(made.get_error()))
    return made


def reason(text: str) -> str:
    """The first line of the library's message: what follows is its own state. Of a pattern, where the first line says only that
    it cannot be read, the cause and the pattern too."""
    first, *others = text.split("\n")
    cause = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    if not first.endswith(":") or not cause:
        return first
    return f"{first} {cause}, in {shortened(others[0].strip())}"


@cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
