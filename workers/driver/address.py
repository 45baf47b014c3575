"""Where a driver listens."""

from __future__ import annotations

import contextlib
import socket


def listen_address(bind_host: str) -> str:
    """`node` is the address by which this node reaches others; anything else is taken as it is."""
    if bind_host != "node":
        return bind_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Connecting a datagram socket sends nothing; it only chooses the outgoing interface. 192.0.2.0/24 is for documentation.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())
