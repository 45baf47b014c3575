"""Shows what `yard up` and `yard down` are doing: a live board on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gateway.api.errors import ErrorCode, YardError

_PLAIN_INTERVAL_S = 2.0


@dataclass(slots=True)
class Step:
    """One thing being done. `fraction` is 0..1 where the progress of the work is known."""

    name: str
    note: str = ""
    fraction: float | None = None
    state: str = "running"  # running, done, failed, stopped
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    printed: str = ""
    printed_s: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.ended_s or time.monotonic()) - self.began_s


class Board:
    """Steps in the order they began. Several may run at once, each reported by the thread that does it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._steps: dict[str, Step] = {}
        self._lock = threading.Lock()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=False)
        self._is_terminal = self._console.is_terminal

    def __enter__(self) -> Board:
        if self._is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_terminal:
            self._live.stop()

    @contextmanager
    def step(self, name: str, note: str = "") -> Iterator[Step]:
        """Done when the block ends, failed when it raises, stopped when somebody did. `update` sets note and fraction."""
        self.update(name, note)
        step = self._steps[name]
        try:
            yield step
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt) or (isinstance(error, YardError) and error.code is ErrorCode.CANCELLED)
            self._end(step, "stopped" if stopped else "failed")
            raise
        self._end(step, "done")

    def update(self, name: str, note: str, fraction: float | None = None) -> None:
        """Begins the step if it is new."""
        with self._lock:
            step = self._steps.setdefault(name, Step(name))
            step.note, step.fraction = note, fraction
            if not self._is_terminal and step.printed != note and time.monotonic() - step.printed_s >= _PLAIN_INTERVAL_S:
                self._print(step, note)

    def end(self, name: str, note: str = "") -> None:
        step = self._steps.get(name)
        if step is not None and step.state == "running":
            step.note = note or step.note
            self._end(step, "done")

    def say(self, text: str) -> None:
        """A line that stays, above the board."""
        self._console.print(text, soft_wrap=True)

    def _end(self, step: Step, state: str) -> None:
        with self._lock:
            step.state, step.ended_s = state, time.monotonic()
            if not self._is_terminal:
                self._print(step, f"{state}{': ' if step.note else ''}{step.note} ({step.seconds:.1f} s)")

    def _print(self, step: Step, text: str) -> None:
        step.printed, step.printed_s = step.note, time.monotonic()
        self._console.print(f"{step.name}: {text or 'starting'}", soft_wrap=True, markup=False)
        sys.stderr.flush()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for step in list(self._steps.values()):
            table.add_row(
                _mark(step), Text(step.name), _bar(step), Text(step.note, style="dim"), Text(f"{step.seconds:.1f} s", "dim")
            )
        return Group(table)


def _mark(step: Step) -> RenderableType:
    if step.state == "running":
        return Spinner("dots", style="cyan")
    return Text("✓", style="green") if step.state == "done" else Text("✗", style="red")


def _bar(step: Step) -> RenderableType:
    if step.state != "running" or step.fraction is None:
        return Text("")
    return ProgressBar(total=1.0, completed=step.fraction, width=20)
