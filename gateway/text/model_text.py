"""All the gateway knows of a model's text: its tokenizer, its chat template, its special ids and its sampling defaults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.api.errors import invalid
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import ByteDetokenizer, Detokenizer, RingDetokenizer
from gateway.text.literal_specials import LiteralSpecials
from gateway.text.schema_check import SchemaCheck
from gateway.text.token_bytes import token_bytes
from gateway.text.tool_prompt import in_text, with_objects

# Tokenizing runs at some 2-5 MB/s; up to this many characters it costs the event loop less than a hop to a thread.
INLINE_CHARACTERS = 4096
# Ids of the prompt that a context-sensitive detokenizer looks at to continue it (a space, a suffix).
PROMPT_TAIL_TOKENS = 6

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as its template renders it. `mark` stands before each special token that is only text; "" = none is."""

    text: str
    mark: str


class ModelText:
    """Immutable after construction, so one instance serves all requests of a model.

    `defaults` are the sampling defaults of the model's own generation config, by their Hugging Face names.
    """

    def __init__(
        self,
        model: str,
        directory: Path,
        *,
        eos_ids: Sequence[int],
        max_context: int,
        defaults: dict[str, Any] | None = None,
        chat_template: str | None = None,
        embeds: bool = False,
    ) -> None:
        """`embeds`: it makes vectors of texts, and writes none."""
        self.model = model
        self.embeds = embeds
        self.eos_ids = frozenset(eos_ids)
        self.max_context = max_context
        self.schemas = SchemaCheck(model, directory, eos_ids)
        self.defaults = defaults or {}
        path = directory / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            spec = json.loads(source)
            self._tokenizer = Tokenizer.from_str(source)
        except (OSError, ValueError, KeyError) as error:
            raise invalid(f"model `{model}`: its tokenizer {path} cannot be read: {error}") from error
        except Exception as error:  # tokenizers raises bare Exception for what it cannot parse
            raise invalid(f"model `{model}`: its tokenizer {path} is not one the tokenizers library reads: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = token_bytes(self._tokenizer, spec)
        self._specials = LiteralSpecials(source, spec, model=model)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=0)  # in characters
        config = _read_json(directory / "tokenizer_config.json")
        template = chat_template or _stored_template(directory, config)
        self._template = ChatTemplate(template, _special_tokens(config), model=model) if template else None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Long texts are tokenized in a thread, without the interpreter lock."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call is the one that releases the interpreter lock; "fast" skips offsets, which nobody reads.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """A chat template writes its own beginning-of-sequence token, so none is added."""
        if not prompt.mark:
            return await self.encode(prompt.text, add_special_tokens=False)
        return await asyncio.to_thread(self._specials.encode, prompt.text, prompt.mark)

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None, begin_with: str = ""
    ) -> ChatPrompt:
        """`begin_with`: what the answer begins with."""
        if self._template is None:
            raise invalid(
                f"model `{self.model}` has no chat template: set spec.chat_template in its manifest, or send a plain prompt",
                field="messages",
            )
        if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            if self._template.writes_calls:
                messages = with_objects(messages)
            else:
                messages, tools = in_text(messages, tools), None
        (messages, tools), mark = self._specials.marked([messages, tools])
        return ChatPrompt(self._template.render(messages, tools=tools) + begin_with, mark)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For one answer that continues `prompt_ids`."""
        if self._table is not None:
            return ByteDetokenizer(self._table)
        return RingDetokenizer(self._tokenizer, prompt_ids[-PROMPT_TAIL_TOKENS:])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, special tokens by name; may be part of a character."""
        if self._table is not None:
            return self._table.raw(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {error}") from error


def _stored_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in stored}
        return by_name.get("default")
    return stored


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """What templates may print, such as `bos_token`; each is a string or an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
