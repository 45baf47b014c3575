"""Finds stop strings in a stream of text (rule 17)."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text on until the first stop string is complete, holding back whatever may be the beginning of one.

    The stop string that is complete first wins, as if the text came one character at a time; of two that end at the same
    character, the longer. Hence neither the text nor the match depends on how the text was chunked.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be given out. After a match (`matched` is set) nothing more comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if (found := self._first_complete(buffer)) is not None:
            start, self.matched = found
            self._held = ""
            return buffer[:start]
        keep = self._possible_beginning(buffer)
        self._held = buffer[len(buffer) - keep :] if keep else ""
        return buffer[: len(buffer) - keep] if keep else buffer

    def finish(self) -> str:
        """The text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> str:
        return self._held

    def _first_complete(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_beginning(self, buffer: str) -> int:
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
