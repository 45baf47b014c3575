"""Ports for servers that cannot be told to take any."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Of the loopback; free in this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
