"""Clients that ask for a stream and do not read it: what is written waits in memory, so it waits for a bounded time."""

from __future__ import annotations

from gateway.api.errors import ErrorCode, YardError

WRITE_S = 60.0
"""A write waits only once the buffers on the way are full: hundreds of kilobytes over HTTP, megabytes over gRPC."""


def gave_up() -> YardError:
    return YardError(ErrorCode.CANCELLED, f"the client has read nothing for {WRITE_S:g} s, so its stream was ended")
