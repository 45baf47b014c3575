"""Special tokens that a user writes stay text: `<|im_end|>` inside a message must not end the message.

A chat template writes special tokens as text too, so once it has rendered, the two look alike. Hence those in messages are
marked before, and the prompt is tokenized by a copy of the tokenizer in which special tokens have other, secret names: the
template's are renamed, the marked ones left as the text that they are. Everything else of the tokenizer stays as it is, so
the rest of the prompt gets the tokens that it always gets.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from gateway.api.errors import invalid

# Noncharacters: never part of a text that is meant to be read.
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class LiteralSpecials:
    """Of one tokenizer, given as its `tokenizer.json` and that parsed. The copy is made when the first such message comes."""

    def __init__(self, source: str, spec: Mapping[str, Any], *, model: str) -> None:
        self._source = source
        self._model = model
        specials = [entry["content"] for entry in spec.get("added_tokens", []) if entry.get("special")]
        self._names = {content: f"\ufffc{secrets.token_hex(8)}\ufffc" for content in specials if content}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def marked(self, value: Any) -> tuple[Any, str]:
        """The messages or tools with a mark before every special token in their text, and the mark; "" when there is none."""
        if self._pattern is None or not any(self._pattern.search(text) for text in _texts(value)):
            return value, ""
        for mark in MARKS:
            if not any(mark in text for text in _texts(value)):
                return self._with_mark(value, mark), mark
        raise invalid(f"the messages for model `{self._model}` are not text: they use every noncharacter", field="messages")

    def encode(self, prompt: str, mark: str) -> list[int]:
        """Tokens of a prompt that was rendered from marked messages. YardError(INVALID) when this tokenizer cannot do it."""
        assert self._pattern is not None
        marked = re.compile(f"({mark})?({self._pattern.pattern})")
        secret = marked.sub(lambda match: match[2] if match[1] else self._names[match[2]], prompt)
        return self._renamed.encode_batch_fast([secret.replace(mark, "")], add_special_tokens=False)[0].ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        spec = json.loads(self._source)
        ids = {}
        for entry in spec["added_tokens"]:
            if entry.get("special"):
                entry["content"] = self._names[entry["content"]]
                ids[entry["content"]] = entry["id"]
        model = spec["model"]
        vocabulary = model.get("vocab", {})
        if isinstance(vocabulary, list):
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in vocabulary]
        else:
            model["vocab"] = {self._names.get(piece, piece): number for piece, number in vocabulary.items()}
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        spec["post_processor"] = spec["truncation"] = spec["padding"] = None
        try:
            tokenizer = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
        except Exception as error:  # tokenizers raises bare Exception for what it cannot parse
            raise self._refusal() from error
        if any(tokenizer.token_to_id(name) != number for name, number in ids.items()):
            raise self._refusal()
        return tokenizer

    def _refusal(self) -> Exception:
        return invalid(
            f"a message contains a special token of model `{self._model}`, whose tokenizer cannot tell it from text; "
            "leave it out",
            field="messages",
        )

    def _with_mark(self, value: Any, mark: str) -> Any:
        assert self._pattern is not None
        if isinstance(value, str):
            return self._pattern.sub(lambda match: mark + match[0], value)
        if isinstance(value, Mapping):
            return {self._with_mark(key, mark): self._with_mark(inner, mark) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self._with_mark(inner, mark) for inner in value]
        return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, Sequence):
        return [text for part in value for text in _texts(part)]
    return []
