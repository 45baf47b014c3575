"""Filters of answers: plug-ins that cut or replace a route's text before it leaves (`response_filter` of a route).

A plug-in is a function of the route's `options` that is named in the entry point group `modelyard.response_filters`; it returns
a function that makes a `TextFilter` for each answer. It runs on threads of its own, for at most its timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from gateway.api.config import ResponseFilterSpec
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.text.word_filter import word_filter

log = logging.getLogger(__name__)

GROUP = "modelyard.response_filters"
THREADS = 4
"""Of each plug-in: as many calls that never return are its end, and what is declared for its failure happens at once."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """`text` may leave now. `held`: how many of the last characters that were fed it holds back. `cut`: the answer ends here."""

    text: str
    held: int = 0
    cut: bool = False


class TextFilter(Protocol):
    """Of one answer; called in order, by one thread at a time."""

    def feed(self, text: str) -> Filtered: ...

    def finish(self) -> Filtered:
        """No more text comes; nothing may be held any more."""
        ...


Plugin = Callable[[Mapping[str, str]], Callable[[], TextFilter]]

BUILT_IN: dict[str, Plugin] = {"words": word_filter}


class AnswerFilter:
    """One answer's. Nothing leaves but what the plug-in gave out, or where it failed and `on_failure` is `open`, what it had
    not given out. After a failure it is not asked again."""

    def __init__(self, spec: ResponseFilterSpec, filter: TextFilter, threads: ThreadPoolExecutor) -> None:
        self._spec = spec
        self._filter = filter
        self._threads = threads
        self._unsaid = ""
        self._failed = False

    async def feed(self, text: str, *, last: bool) -> Filtered:
        """YardError(INTERNAL) when it failed and the route is to fail closed."""
        self._unsaid += text
        if self._failed:
            return self._all_unsaid()
        try:
            async with asyncio.timeout(self._spec.timeout_ms / 1000):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, self._apply, text, last)
        except Exception as error:  # noqa: BLE001 - whatever a plug-in raises, its route has declared what then happens
            return self._on_failure(error)
        self._unsaid = self._unsaid[-found.held :] if found.held > 0 else ""
        return found

    def _apply(self, text: str, last: bool) -> Filtered:
        found = self._filter.feed(text) if text else Filtered("")
        if last and not found.cut:
            end = self._filter.finish()
            found = Filtered(found.text + end.text, cut=end.cut)
        return found

    def _on_failure(self, error: Exception) -> Filtered:
        self._failed = True
        what = f"took more than {self._spec.timeout_ms} ms" if isinstance(error, TimeoutError) else f"failed: {error!r}"
        log.error("response filter `%s` %s; it fails %s", self._spec.name, what, self._spec.on_failure)
        if self._spec.on_failure == "open":
            return self._all_unsaid()
        message = "the filter of this route's answers failed, so the rest of the answer is not given; ask the route's owner"
        raise YardError(ErrorCode.INTERNAL, message) from error

    def _all_unsaid(self) -> Filtered:
        text, self._unsaid = self._unsaid, ""
        return Filtered(text)


class FilterLibrary:
    """The plug-ins of a gateway's routes, each made once for the options that it is given."""

    def __init__(self) -> None:
        self._made: dict[ResponseFilterSpec, Callable[[], TextFilter]] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def answer_filter(self, route: str, spec: ResponseFilterSpec) -> AnswerFilter | None:
        """None where it cannot be made and the route is to fail open. YardError(UNAVAILABLE) where it is to fail closed."""
        try:
            if spec not in self._made:
                self._made[spec] = _plugin(spec.name)(dict(spec.options))
            made = self._made[spec]()
        except Exception as error:
            log.error("route `%s`: its response filter `%s` cannot be made: %r", route, spec.name, error)
            if spec.on_failure == "open":
                return None
            raise unavailable(f"route `{route}`: the filter of its answers cannot be made: {error}", 5.0) from error
        threads = self._threads.get(spec.name)
        if threads is None:
            threads = self._threads[spec.name] = ThreadPoolExecutor(THREADS, thread_name_prefix=f"filter-{spec.name}")
        return AnswerFilter(spec, made, threads)


def _plugin(name: str) -> Plugin:
    if name in BUILT_IN:
        return BUILT_IN[name]
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    known = sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})
    raise LookupError(f"no installed package has an entry point {name!r} in {GROUP}; there are {', '.join(known)}")
