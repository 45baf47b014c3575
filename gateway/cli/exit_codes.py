"""What a caller of `yard` learns from its exit code."""

from __future__ import annotations

from gateway.api.errors import ErrorCode

EXIT_CODES: dict[ErrorCode, int] = {
    ErrorCode.INTERNAL: 1,
    ErrorCode.INVALID: 2,  # also wrong options
    ErrorCode.UNIMPLEMENTED: 2,
    ErrorCode.NOT_FOUND: 3,
    ErrorCode.UNAVAILABLE: 4,
    ErrorCode.CONFLICT: 5,
    ErrorCode.EXHAUSTED: 6,
    ErrorCode.UNAUTHENTICATED: 7,
    ErrorCode.DENIED: 7,
    ErrorCode.DEADLINE: 8,
    ErrorCode.CANCELLED: 130,
}
NOT_READY = 4
INTERRUPTED = 130
