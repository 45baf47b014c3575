"""How far a run of bench or stress is, on standard error: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.api.tasks import cancelled

if TYPE_CHECKING:
    from gateway.load.drive import Plan

TERMINAL_S = 0.5
PLAIN_S = 10.0


@asynccontextmanager
async def shown(plan: Plan) -> AsyncIterator[Callable[[int], None]]:
    """Gives what is to be told how many requests have ended. Time is shown also while none does."""
    began_s, ended = time.monotonic(), 0
    is_live = sys.stderr.isatty()

    def tell(count: int) -> None:
        nonlocal ended
        ended = count

    async def show() -> None:
        while True:
            await asyncio.sleep(TERMINAL_S if is_live else PLAIN_S)
            text = line(plan, ended, time.monotonic() - began_s)
            print(f"\r\x1b[K{text}" if is_live else text, end="" if is_live else "\n", file=sys.stderr, flush=True)

    task = asyncio.create_task(show())
    try:
        yield tell
    finally:
        await cancelled([task])
        if is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def line(plan: Plan, ended: int, elapsed_s: float) -> str:
    if plan.requests is not None:
        return f"{ended} of {plan.requests}, {elapsed_s:.0f} s"
    return f"{ended} requests, {elapsed_s:.0f} of {plan.duration_s or 0:.0f} s"
