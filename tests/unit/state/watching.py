"""Waiting for a site view to become what a test expects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.state.view import SiteView


async def until(view: SiteView, condition: Callable[[SiteView], bool], timeout_s: float = 20.0) -> None:
    """Returns when the condition holds; looks again after each change of the view."""
    changed = asyncio.Event()
    unsubscribe = view.subscribe(changed.set)
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(view):
                changed.clear()
                await changed.wait()
    finally:
        unsubscribe()
