"""A rank beside its card: its threads run on the CPUs of the NUMA node that the card hangs on. So the host memory that they touch
first, pinned copies of parked models above all, lies there too, and copies do not cross the link between sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

SYS = Path("/sys")


def node_of(address: str, sys: Path = SYS) -> int:
    """The NUMA node of a PCI device, e.g. 0000:1b:00.0; -1: not known, or a machine without several."""
    try:
        return int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def stay_beside(node: int, sys: Path = SYS) -> Collection[int]:
    """Bind all threads of this process, and so those that they start, to the CPUs of a node.

    These CPUs; none, and nothing changed, where the node is not known or has none that this process may use.
    """
    try:
        there = _cpus((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()
    allowed = os.sched_getaffinity(0) & there
    if not allowed:
        log.warning("the card hangs on NUMA node %d, none of whose CPUs this process may use: copies cross sockets", node)
        return ()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), allowed)
    return allowed


def _cpus(text: str) -> set[int]:
    """0-3,8: the kernel's way to list CPUs."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
