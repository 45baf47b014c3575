"""A request as its client wrote it, for servers that do their own templates and tokenizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Words:
    """Either `messages` or `prompt`; neither when the prompt is token ids. `sampling` has what the client asked for, by its
    OpenAI names, and nothing else: the rest is the server's to choose."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    stop: Sequence[str] = ()
    add_special_tokens: bool = True  # to a prompt
    sampling: Mapping[str, float | int] = field(default_factory=dict)
