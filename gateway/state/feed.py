"""Keeps a SiteView up to date: the only writer of one (rules 12 and 13)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import AsyncIterator

import msgspec
from redis.asyncio.client import PubSub
from redis.exceptions import ResponseError

from gateway.api.records import HEARTBEAT_S, HEARTBEAT_TTL_S
from gateway.state.connection import LOST
from gateway.state.snapshot import Observed, Snapshot, lost_names, newest, relation
from gateway.state.store import SiteStore
from gateway.state.view import SiteView

log = logging.getLogger(__name__)

RESYNC_S = 30.0
RETRY_S = 0.5


class SiteFeed:
    """Reads the site into the view, until cancelled:

    1. Subscribe to changes, and wait until Redis confirms it.
    2. Read the whole snapshot. From here on the view is not degraded.
    3. For each announced revision that is not the one read last, read again. Readings are whole and one after the other,
       so revisions are applied in order and a gap cannot stay. An announced heartbeat is read by itself.
    4. Each HEARTBEAT_S compare the stored revision and identity, and read the heartbeats: a lost message is repaired (rule 13),
       an expired record leaves the view. Each RESYNC_S or so read everything whatever the revision says.
    5. Any failure: the view keeps what it has and is degraded (rule 12); begin again at 1. For HEARTBEAT_TTL_S after that,
       missing heartbeats remove nothing, since their senders are only coming back as well.

    6. A store that answers but takes no writes (its disk is full) is asked each HEARTBEAT_S to take one: while it refuses, the
       view is degraded, and heartbeats that expire remove nothing, since nobody can send new ones.

    What the store has lost and this process still holds is given back to it (the higher generation wins), as after a failover
    to a replica that lagged. A store that was emptied is another store, and nothing is written into that by itself: the view
    keeps what it has and is degraded until somebody restores (or gives up) what was there.
    """

    def __init__(self, view: SiteView, store: SiteStore, *, resync_s: float = RESYNC_S) -> None:
        self._view = view
        self._store = store
        self._resync_s = resync_s
        # Revision and identity of the last reading; the revision is less than the view's when the store lost writes.
        self._stored = (-1, "")
        self._keep_until = 0.0
        self._refusal = ""  # of writes
        self._actor = f"feed of {socket.gethostname()}"

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (*LOST, msgspec.MsgspecError) as error:
                self._lost(error)
                await self._store.forget_connections()
            await asyncio.sleep(random.uniform(0.5, 1.0) * RETRY_S)

    async def _follow(self) -> None:
        keys = self._store.keys
        changes = keys.changes.encode()
        async with self._subscription(keys.changes, keys.observed) as pubsub:
            await self._read_desired()
            await self._try_write()
            await self._read_observed()
            next_tick, next_resync = self._after(HEARTBEAT_S), self._after(self._resync_s)
            while True:
                message = await pubsub.get_message(timeout=max(next_tick - time.monotonic(), 0.001))
                if message is not None and message["type"] == "message":
                    await self._on_message(message["channel"] == changes, message["data"].decode())
                now = time.monotonic()
                if now >= next_resync:
                    await self._read_desired()
                    next_resync = self._after(self._resync_s)
                if now >= next_tick:
                    if await self._store.version() != self._stored:
                        await self._read_desired()
                    await self._try_write()
                    await self._read_observed()
                    next_tick = self._after(HEARTBEAT_S)

    @contextlib.asynccontextmanager
    async def _subscription(self, *channels: str) -> AsyncIterator[PubSub]:
        async with self._store.waits.pubsub() as pubsub:
            async with asyncio.timeout(HEARTBEAT_TTL_S):
                await pubsub.subscribe(*channels)
                confirmed = 0
                while confirmed < len(channels):
                    message = await pubsub.get_message(timeout=HEARTBEAT_TTL_S)
                    confirmed += message is not None and message["type"] == "subscribe"
            yield pubsub

    async def _on_message(self, is_change: bool, text: str) -> None:
        if is_change:
            if text != str(self._stored[0]):
                await self._read_desired()
            return
        kind, _, name = text.partition(":")
        if kind == "pool":
            record = await self._store.pool_record(name)
            pools = {key: value for key, value in self._view.pools.items() if key != name}
            if record is not None:
                pools[name] = record
            self._apply(Observed(pools, self._view.gateways, self._view.controller))

    async def _read_desired(self) -> None:
        stored, held = await self._store.snapshot(), self._view.desired
        match relation(held, stored):
            case "replaced":
                self._stored = (stored.revision, stored.identity)
                self._replaced(held)
                return
            case "given_up":
                log.warning("what was held here was given up for the store as it is")
                held = Snapshot()
        lost = lost_names(held, stored)
        if lost:
            log.warning("the store forgot %s; giving back what is held here", ", ".join(map(str, sorted(lost))))
            await self._store.give_back(held, stored, self._actor)
            again = await self._store.snapshot()
            if relation(held, again) != "same":
                return  # it was emptied in this moment; the next look sees it
            stored = again
        self._stored = (stored.revision, stored.identity)
        self._view.apply_desired(newest(held, stored))
        if self._view.replaced:
            self._view.replaced = False
            self._judge()

    async def _try_write(self) -> None:
        try:
            await self._store.try_write()
        except ResponseError as error:
            if not self._refusal:
                log.warning("the store takes no writes: %s; what is held is served, and no heartbeat is missed", error)
            self._refusal = f"the store takes no writes: {error}"
            self._keep_until = time.monotonic() + HEARTBEAT_TTL_S
        else:
            self._refusal = ""
        self._judge()

    def _judge(self) -> None:
        if not self._view.replaced:
            self._view.set_degraded(self._refusal or None)

    def _replaced(self, held: Snapshot) -> None:
        if not self._view.replaced:
            reason = (
                f"the store is not the one that revision {held.revision} was read from: it was emptied or replaced; "
                "`yard restore` writes what is held here into it, `yard restore --discard` takes it as it is"
            )
            log.error("%s; serving what is held until then", reason)
            self._view.replaced = True
            self._view.set_degraded(reason)

    async def _read_observed(self) -> None:
        self._apply(await self._store.observed())

    def _apply(self, observed: Observed) -> None:
        if time.monotonic() < self._keep_until:
            view = self._view
            observed = Observed(
                pools={**view.pools, **observed.pools},
                gateways={**view.gateways, **observed.gateways},
                controller=observed.controller or view.controller,
            )
        self._view.apply_observed(observed)

    def _lost(self, error: BaseException) -> None:
        self._view.replaced = False
        reason = f"the store cannot be read: {error or type(error).__name__}"
        if not self._view.degraded:
            log.warning("%s; serving from revision %d until it is back", reason, self._view.revision)
        self._view.set_degraded(reason)
        self._keep_until = time.monotonic() + HEARTBEAT_TTL_S

    @staticmethod
    def _after(seconds: float) -> float:
        return time.monotonic() + random.uniform(0.8, 1.2) * seconds
