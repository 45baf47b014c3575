"""Where a process of a site listens, and how others reach its node."""

from __future__ import annotations

import contextlib
import socket


def node_address() -> str:
    """The address that other machines reach this one by: that of the interface with the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Connecting a datagram socket sends nothing; it only chooses the outgoing interface. 192.0.2.0/24 is for documentation.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())


def listen_address(bind_host: str) -> str:
    """`node` is the address by which this node reaches others; anything else is taken as it is."""
    return node_address() if bind_host == "node" else bind_host
