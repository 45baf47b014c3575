"""Ending background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancels tasks until all have ended; their results and errors are left where they are.

    Once is not enough: redis-py loses a cancellation that falls into its connecting (it turns it into a TimeoutError, which
    is a lost connection like any other to the task), so `task.cancel(); await task` may wait for ever.
    """
    pending = {task for task in tasks if task is not None and not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
