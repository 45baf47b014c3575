"""The store's connections: never retried behind our back, because a write that was sent may have been done."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.api.redis_link import connect

CALL_TIMEOUT_S = 2.5
LOST = (RedisError, OSError, TimeoutError)
"""What a call raises when Redis is gone, hangs or refuses."""


def open_calls(redis_url: str) -> Redis:
    """For commands that answer at once."""
    return _once(connect(redis_url, call_timeout_s=CALL_TIMEOUT_S))


def open_waits(redis_url: str) -> Redis:
    """For subscriptions and blocking reads, which bring their own timeouts."""
    return _once(connect(redis_url, call_timeout_s=None))


def _once(client: Redis) -> Redis:
    client.set_retry(Retry(NoBackoff(), 0))
    return client


def refused(error: BaseException, what: str) -> YardError:
    """The error of a change or a read that Redis did not answer (rule 12)."""
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return unavailable(
            f"{what}: the store did not answer in {CALL_TIMEOUT_S} s, so it may or may not be done; look, then repeat", 2.0
        )
    if isinstance(error, ResponseError) and "MISCONF" in str(error):
        message = f"{what}: the store cannot write to its disk ({error}); make room on it, then repeat"
        return YardError(ErrorCode.EXHAUSTED, message, retry_after_s=2.0)
    if isinstance(error, ResponseError):
        return unavailable(f"{what}: the store refuses it ({error}); see to its role, memory or access rules", 2.0)
    return unavailable(f"{what}: the store cannot be reached ({error}); changes are refused until it is back", 2.0)
