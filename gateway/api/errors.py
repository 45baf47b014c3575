"""The errors a client can see, the same over gRPC, HTTP and between gateway and pool."""

from __future__ import annotations

from enum import StrEnum

import grpc


class ErrorCode(StrEnum):
    """What went wrong, as it travels between processes. Each maps to one gRPC status and one HTTP status."""

    NOT_FOUND = "not_found"  # unknown model or route
    INVALID = "invalid"  # bad request
    UNAUTHENTICATED = "unauthenticated"
    DENIED = "denied"  # known caller, not allowed
    EXHAUSTED = "exhausted"  # queue or quota full; carries retry-after
    UNAVAILABLE = "unavailable"  # loading, draining, no replica, replica lost; carries retry-after
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CONFLICT = "conflict"  # compare-and-set lost, or a stale fencing token
    UNIMPLEMENTED = "unimplemented"  # well asked, and nothing that this model's engine can do
    INTERNAL = "internal"


GRPC_STATUS: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.DENIED: 403,
    ErrorCode.EXHAUSTED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.CONFLICT: 409,
    ErrorCode.UNIMPLEMENTED: 400,  # clients repeat what is answered 501
    ErrorCode.INTERNAL: 500,
}


class YardError(Exception):
    """An error with a place in the table above. Its message names the thing, the cause and the next step.

    `field` names the offending request or configuration field; `retry_after_s` is set where trying again makes sense.
    """

    def __init__(self, code: ErrorCode, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def grpc_status(self) -> grpc.StatusCode:
        return GRPC_STATUS[self.code]

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]


def invalid(message: str, field: str | None = None) -> YardError:
    return YardError(ErrorCode.INVALID, message, field=field)


def not_found(message: str) -> YardError:
    return YardError(ErrorCode.NOT_FOUND, message)


def unavailable(message: str, retry_after_s: float = 1.0) -> YardError:
    return YardError(ErrorCode.UNAVAILABLE, message, retry_after_s=retry_after_s)


def shortened(text: str, characters: int = 128) -> str:
    """For what came from outside and is named in a message: its beginning, and how much was left out."""
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"
