"""Clients that ask for a stream and do not read it: what is written waits in memory, so it waits for a bounded time."""

from __future__ import annotations

import asyncio

from gateway.api.errors import ErrorCode, YardError

WRITE_S = 60.0
"""A write waits only once the buffers on the way are full: hundreds of kilobytes over HTTP, megabytes over gRPC."""


def gave_up() -> YardError:
    return YardError(ErrorCode.CANCELLED, f"the client has read nothing for {WRITE_S:g} s, so its stream was ended")


class WriteWatch:
    """Cancels the task that made it when one of its writes takes longer than WRITE_S, and says so in `gave_up`.

    One timer for all writes of a stream: each token is a write, and a timer for each would cost a tenth of it.
    """

    __slots__ = ("_began_s", "_loop", "_task", "_timer", "gave_up")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._began_s: float | None = None
        self.gave_up = False

    def begins(self) -> None:
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(WRITE_S, self._look)

    def ends(self) -> None:
        self._began_s = None

    def close(self) -> None:
        self._began_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._began_s is None:
            return  # the next write begins anew
        left_s = self._began_s + WRITE_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._task is not None:
            self.gave_up = True
            self._task.cancel()
