"""The lease that lets one controller act, with its fencing token. Drivers refuse a token older than one they have seen."""

from __future__ import annotations

import time

from gateway.state.store import SiteStore, script_text

TTL_S = 6.0
_SAFETY = 0.75

# Writes only while the lease is held. KEYS: 1 lease, 2 target · ARGV: 1 lease value, 2 value, 3 time to live in ms or 0
_GUARDED_SET = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[3] == '0' then redis.call('SET', KEYS[2], ARGV[2]) else redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lease:
    """Owned by one loop. `fence` is 0 while it is not held.

    The holder believes in it for 3/4 of its time to live since it last asked, so that it stops before another begins,
    also when Redis does not answer.
    """

    def __init__(self, store: SiteStore, owner: str, ttl_s: float = TTL_S) -> None:
        self._store = store
        self._owner = owner
        self._ttl_ms = int(ttl_s * 1000)
        self._fence = 0
        self._until = 0.0
        self._take = store.redis.register_script(script_text("lease"))
        self._guarded = store.redis.register_script(_GUARDED_SET)
        self._drop = store.redis.register_script(_RELEASE)

    @property
    def fence(self) -> int:
        return self._fence if time.monotonic() < self._until else 0

    async def hold(self, seen_fence: int = 0) -> int:
        """Takes or renews it; the fencing token, or 0 when another holds it. Redis errors come out as they are.

        A token not above `seen_fence` is exchanged for a higher one.
        """
        asked = time.monotonic()
        fence, _ = await self._take(
            keys=[self._store.keys.lease, self._store.keys.fence], args=[self._owner, self._ttl_ms, seen_fence]
        )
        self._fence = int(fence)
        self._until = asked + _SAFETY * self._ttl_ms / 1000 if self._fence else 0.0
        return self._fence

    async def write(self, key: str, value: bytes, ttl_s: float = 0.0) -> bool:
        """Sets a key if the lease is still held, in one step; False: it is not, and nothing was written."""
        if not self.fence:
            return False
        args = [self._value(), value, int(ttl_s * 1000)]
        if await self._guarded(keys=[self._store.keys.lease, key], args=args):
            return True
        self._until = 0.0
        return False

    async def release(self) -> None:
        """Lets the next one begin at once."""
        if self._fence:
            value = self._value()
            self._fence, self._until = 0, 0.0
            await self._drop(keys=[self._store.keys.lease], args=[value])

    def _value(self) -> str:
        return f"{self._fence} {self._owner}"
