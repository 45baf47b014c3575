"""gRPC's own thread beside the event loop."""

from __future__ import annotations

import os
import threading

import pytest
from lone_gateway import LoneGateway

from gateway.servers import grpc_poller


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the policy is Linux's")
async def test_it_does_not_interrupt_the_loop(lone: LoneGateway) -> None:
    """Also that grpcio still calls it what it is looked for by."""
    grpc_poller.yield_to_loop()
    [thread] = [each for each in threading.enumerate() if "_poll_wrapper" in each.name]
    assert os.sched_getscheduler(thread.native_id or 0) == os.SCHED_BATCH
    assert os.sched_getscheduler(threading.main_thread().native_id or 0) == os.SCHED_OTHER
