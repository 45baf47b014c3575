"""How a YardError leaves a gRPC call."""

from __future__ import annotations

from typing import NoReturn

import grpc

from gateway.api.errors import YardError

MESSAGE_BYTES = 6000
"""gRPC clients take 8 KiB of trailing metadata in all."""


async def abort(context: grpc.aio.ServicerContext, error: YardError, *, degraded: bool = False) -> NoReturn:
    """Ends the call with the error's status; the field and the time to try again are in the trailing metadata."""
    trailing: list[tuple[str, str]] = []
    if error.field:
        trailing.append(("modelyard-field", error.field))
    if error.retry_after_s is not None:
        milliseconds = str(max(0, round(error.retry_after_s * 1000)))
        # The second is what gRPC's own retry policies look at.
        trailing += [("retry-after-ms", milliseconds), ("grpc-retry-pushback-ms", milliseconds)]
    if degraded:
        trailing.append(("modelyard-degraded", "true"))
    await context.abort(error.grpc_status, fitting(error.message), tuple(trailing))
    raise AssertionError("abort raises")


def fitting(message: str) -> str:
    """As much of a message as a client's metadata limit lets through; of a longer one the call would end as UNKNOWN."""
    room = MESSAGE_BYTES
    for position, character in enumerate(message):
        # As it is percent-encoded on the wire.
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{message[:position]}… (cut)"
    return message
