"""The response filter `words`: replaces words, or cuts the answer before the first of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.text.response_filter import Filtered


def word_filter(options: Mapping[str, str]) -> Callable[[], WordFilter]:
    """`words`: separated by commas, in any case; `replacement` (default `***`), or `action: cut`."""
    words = [word.strip() for word in options.get("words", "").split(",") if word.strip()]
    if not words:
        raise ValueError("options.words is empty: name at least one word")
    if unknown := sorted(options.keys() - {"words", "replacement", "action"}):
        raise ValueError(f"options has no {unknown[0]}; there are words, replacement and action")
    if options.get("action", "replace") not in ("replace", "cut"):
        raise ValueError("options.action must be replace or cut")
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))), re.IGNORECASE)
    cut, replacement = options.get("action") == "cut", options.get("replacement", "***")
    return lambda: WordFilter(pattern, max(map(len, words)), replacement, cut)


class WordFilter:
    """Holds back as many characters as a word may still need."""

    def __init__(self, pattern: re.Pattern[str], longest: int, replacement: str, cut: bool) -> None:
        self._pattern = pattern
        self._longest = longest
        self._replacement = replacement
        self._cut = cut
        self._held = ""

    def feed(self, text: str) -> Filtered:
        return self._pass(self._held + text, self._longest - 1)

    def finish(self) -> Filtered:
        return self._pass(self._held, 0)

    def _pass(self, text: str, keep: int) -> Filtered:
        from gateway.text.response_filter import Filtered

        said, end = [], 0
        safe = len(text) - keep  # a word that begins before it has come whole, and so has every longer one
        for match in self._pattern.finditer(text):
            if match.start() >= safe:
                break
            said.append(text[end : match.start()])
            end = match.end()
            if self._cut:
                self._held = ""
                return Filtered("".join(said), cut=True)
            said.append(self._replacement)
        edge = max(end, safe)
        said.append(text[end:edge])
        self._held = text[edge:]
        return Filtered("".join(said), len(self._held))
