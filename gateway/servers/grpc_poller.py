"""gRPC's own thread, which wakes the event loop for each message that came or went."""

from __future__ import annotations

import contextlib
import os
import threading

_NAME = "_poll_wrapper"


def yield_to_loop() -> None:
    """Has it run when the loop waits, or on another core, instead of interrupting the loop after each message that it sends.

    A third of the CPU time of a streamed token was that (ops/bench/gateway.py). On Linux a thread under SCHED_BATCH has the same
    share of the CPU as any other and does not preempt; where the kernel has no such thing or does not let us, nothing changes.
    """
    for thread in threading.enumerate():
        if _NAME in thread.name and thread.native_id is not None and hasattr(os, "SCHED_BATCH"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
