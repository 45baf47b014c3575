"""The driver's heartbeat and events in Redis. Without Redis the driver serves on; what it has to say waits, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

import msgspec
from redis.exceptions import RedisError

from gateway.api.records import HEARTBEAT_S, HEARTBEAT_TTL_S, Keys, PoolRecord
from gateway.api.redis_link import connect

log = logging.getLogger(__name__)

EVENTS_KEPT = 10_000
EVENTS_WAITING = 1_000
_SETTLE_S = 0.02  # several changes of one moment are one message


class Heartbeat:
    """Is the `Observer` of the loop. `record` makes the newest PoolRecord."""

    def __init__(self, redis_url: str, site: str, pool: str, actor: str) -> None:
        self._redis = connect(redis_url) if redis_url else None
        self._keys = Keys(site)
        self._pool = pool
        self._actor = actor
        self._events: deque[dict[str, str]] = deque(maxlen=EVENTS_WAITING)
        self._changed = asyncio.Event()
        self.reachable = True

    def event(self, kind: str, subject: str, message: str) -> None:
        self._events.append(
            {
                "kind": f"{'model' if subject else 'pool'}.{kind}",
                "subject": f"Model/{subject}" if subject else f"Pool/{self._pool}",
                "message": message,
                "actor": self._actor,
                "detail": f"pool {self._pool}",
            }
        )
        self._changed.set()

    def changed(self) -> None:
        self._changed.set()

    async def run(self, record: Callable[[], PoolRecord]) -> None:
        """Until cancelled."""
        if self._redis is None:
            await asyncio.Event().wait()
        while True:
            self._changed.clear()
            if not await self._publish(record()):
                await asyncio.sleep(HEARTBEAT_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
                await asyncio.sleep(_SETTLE_S)

    async def newest_fence(self) -> int:
        """The newest fencing token that the site gave out: a restarted driver refuses older ones from the start. 0: not known."""
        if self._redis is None:
            return 0
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                return int(await self._redis.get(self._keys.fence) or 0)
        except (RedisError, OSError, TimeoutError):
            return 0

    async def pool_is_deleted(self) -> bool:
        """Redis says that nobody wants this pool; False also where it does not say."""
        if self._redis is None:
            return False
        try:
            async with asyncio.timeout(HEARTBEAT_TTL_S):
                return not await self._redis.hexists(self._keys.desired("Pool"), self._pool)  # type: ignore[misc]
        except (RedisError, OSError, TimeoutError):
            return False

    async def withdraw(self) -> None:
        """The driver stops: gateways need not wait for the record to expire."""
        if self._redis is None:
            return
        try:
            await self._redis.delete(self._keys.pool(self._pool))
            await self._redis.publish(self._keys.observed, f"pool:{self._pool}")
        except (RedisError, OSError) as error:
            log.warning("pool %s: its record stays until it expires: %s", self._pool, type(error).__name__)

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    async def _publish(self, record: PoolRecord) -> bool:
        assert self._redis is not None
        body = msgspec.json.encode(record)
        try:
            async with asyncio.timeout(HEARTBEAT_TTL_S):
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.set(self._keys.pool(self._pool), body, px=int(HEARTBEAT_TTL_S * 1000))
                pipeline.sadd(self._keys.pools, self._pool)
                pipeline.publish(self._keys.observed, f"pool:{self._pool}")
                sent = list(self._events)
                for event in sent:
                    pipeline.xadd(self._keys.events, event, maxlen=EVENTS_KEPT, approximate=True)  # type: ignore[arg-type]
                await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            if self.reachable:
                log.warning("pool %s: Redis is away (%s), serving on", self._pool, type(error).__name__)
            self.reachable = False
            return False
        while self._events and any(self._events[0] is event for event in sent[:1]):
            self._events.popleft()
            sent.pop(0)
        if not self.reachable:
            log.info("pool %s: Redis is back", self._pool)
        self.reachable = True
        return True
