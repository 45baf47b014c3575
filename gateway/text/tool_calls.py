"""Finds the calls of functions in an answer, as it comes."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Protocol

from gateway.text.tool_prompt import BEGIN, END


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call; `id` and `name` are set in its first."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class CallReader(Protocol):
    """Of one choice."""

    def read(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """More of the answer; what of it is text for the client, and what are calls."""
        ...


class FreeCalls:
    """Of an answer in which the model may call functions: each block is a call once it is closed and holds one, else it is text.

    Blanks around blocks belong to them.
    """

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        """`most`: calls after so many are dropped."""
        self._names = names
        self._most = most
        self._pending = ""
        self._calls = 0
        self._after_call = False

    def read(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        self._pending += text
        shown = ""
        calls: list[CallDelta] = []
        while self._pending:
            before, begin, inside = self._pending.partition(BEGIN)
            if not begin:
                kept = 0 if last else _withheld(before)
                shown += self._text(before[: len(before) - kept])
                self._pending = before[len(before) - kept :]
                break
            block, end, after = inside.partition(END)
            if not end and not last:
                text = before.rstrip()
                shown += self._text(text)
                self._pending = before[len(text) :] + begin + inside
                break
            call = self._call(block)
            if call is None:
                shown += self._text(before + begin + block + end)
            else:
                shown += self._text(before.rstrip())
                self._after_call = True
                calls.extend([call] if self._most is None or self._calls <= self._most else [])
            self._pending = after
        return shown, calls

    def _text(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _call(self, block: str) -> CallDelta | None:
        try:
            call = json.loads(block)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if name not in self._names or not isinstance(arguments, dict):
            return None
        self._calls += 1
        return CallDelta(self._calls - 1, json.dumps(arguments, ensure_ascii=False), _new_id(), name)


class ForcedCall:
    """Of an answer that is held to be one call, `{"name": …, "arguments": …}`: its arguments come as they are written."""

    def __init__(self) -> None:
        self._pending = ""
        self._begun = False

    def read(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        self._pending += text
        calls = []
        if not self._begun:
            name, found, rest = self._pending.removeprefix('{"name": "').partition('", "arguments": ')
            if not found:
                return "", []
            self._begun, self._pending = True, rest
            calls.append(CallDelta(0, "", _new_id(), name))
        # The last brace closes the call, not its arguments.
        kept = len(self._pending) - 1 if self._pending.endswith("}") else len(self._pending)
        if kept > 0:
            calls.append(CallDelta(0, self._pending[:kept]))
            self._pending = self._pending[kept:]
        return "", calls


def _withheld(text: str) -> int:
    """Characters at the end that may belong to a block: blanks, and what it may begin with."""
    begun = next((size for size in range(min(len(text), len(BEGIN) - 1), 0, -1) if text.endswith(BEGIN[:size])), 0)
    rest = text[: len(text) - begun]
    return begun + len(rest) - len(rest.rstrip())


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
