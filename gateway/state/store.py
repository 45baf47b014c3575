"""Desired and observed state in Redis or Valkey. Every change of desired state goes through one script."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.api.config import DESIRED_KINDS
from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import HEARTBEAT_TTL_S, ControllerRecord, DesiredObject, GatewayRecord, Keys, PoolRecord
from gateway.state.connection import LOST, open_calls, open_waits, refused
from gateway.state.edits import Put, Write, apply_edit, delete_edit, rollback_edit, switch_edit
from gateway.state.snapshot import ObjectKey, Observed, Snapshot, lost_names

AUDIT_ENTRIES = 10_000
ATTEMPTS = 16
# Takes a name off its set unless its sender has come back in this moment.
FORGET = "if redis.call('EXISTS', KEYS[2]) == 0 then return redis.call('SREM', KEYS[1], ARGV[1]) end return 0"

Edit = Callable[[Snapshot], Sequence[Write]]


@dataclass(frozen=True)
class Commit:
    """What a change did. `revision` is the site's afterwards; writes with action `unchanged` wrote nothing."""

    revision: int
    writes: tuple[Write, ...]


class SiteStore:
    """One site in one Redis. Connects at the first call; errors of Redis itself come out of reads as they are, and of
    changes as YardError UNAVAILABLE."""

    def __init__(self, redis_url: str, site: str) -> None:
        self.keys = Keys(site)
        self.redis: Redis = open_calls(redis_url)
        self.waits: Redis = open_waits(redis_url)
        self._desired_script = self.redis.register_script(script_text("desired"))
        self._forget_script = self.redis.register_script(FORGET)
        self._restore_script = self.redis.register_script(script_text("restore"))

    async def close(self) -> None:
        await self.redis.aclose()
        await self.waits.aclose()

    async def forget_connections(self) -> None:
        """After one has broken, those that lie ready are as good as broken: the next call over one would fail."""
        with contextlib.suppress(*LOST):
            await self.redis.connection_pool.disconnect(inuse_connections=False)

    # Reads.

    async def revision(self) -> int:
        return int(await self.redis.get(self.keys.revision) or 0)

    async def version(self) -> tuple[int, str]:
        """Revision and identity: a store that was begun anew may have come to the same revision."""
        revision, identity = cast("list[bytes | None]", await self.redis.mget(self.keys.revision, self.keys.identity))
        return int(revision or 0), (identity or b"").decode()

    async def try_write(self) -> None:
        """ResponseError when the store answers but takes no writes: its disk or its memory is full, it became a replica."""
        await self.redis.set(self.keys.written, b"", px=int(HEARTBEAT_TTL_S * 1000))

    async def snapshot(self) -> Snapshot:
        """All of desired state, read at one revision."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.get(self.keys.revision)
            pipe.get(self.keys.identity)
            pipe.hgetall(self.keys.tombstones)
            for kind in DESIRED_KINDS:
                pipe.hgetall(self.keys.desired(kind))
            revision, identity, tombstones, *hashes = await pipe.execute()
        objects = {}
        for kind, values in zip(DESIRED_KINDS, hashes, strict=True):
            for name, raw in values.items():
                objects[ObjectKey(kind, name.decode())] = msgspec.json.decode(raw, type=DesiredObject)
        dead = {ObjectKey.parse(name.decode()): int(generation) for name, generation in tombstones.items()}
        return Snapshot(int(revision or 0), objects, dead, (identity or b"").decode())

    async def get(self, kind: str, name: str) -> DesiredObject | None:
        raw = await self.redis.hget(self.keys.desired(kind), name)
        return msgspec.json.decode(raw, type=DesiredObject) if raw else None

    async def list(self, kind: str) -> tuple[DesiredObject, ...]:
        snapshot = await self.snapshot()
        return tuple(stored for key, stored in sorted(snapshot.objects.items()) if key.kind == kind)

    async def observed(self) -> Observed:
        """All heartbeat records that have not expired; forgets the names of those that have."""
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.smembers(self.keys.pools)
            pipe.smembers(self.keys.gateways)
            pipe.get(self.keys.controller)
            pool_names, gateway_names, controller = await pipe.execute()
        pools = await self._records(self.keys.pools, pool_names, self.keys.pool, PoolRecord)
        gateways = await self._records(self.keys.gateways, gateway_names, self.keys.gateway, GatewayRecord)
        return Observed(pools, gateways, msgspec.json.decode(controller, type=ControllerRecord) if controller else None)

    async def pool_record(self, name: str) -> PoolRecord | None:
        raw = await self.redis.get(self.keys.pool(name))
        return msgspec.json.decode(raw, type=PoolRecord) if raw else None

    async def _records(self, members: str, names: set[bytes], key: Callable[[str], str], kind: type) -> dict[str, Any]:
        if not names:
            return {}
        ordered = sorted(name.decode() for name in names)
        found = await self.redis.mget([key(name) for name in ordered])
        for name, raw in zip(ordered, found, strict=True):
            if raw is None:
                with contextlib.suppress(ResponseError):  # of a store that takes no writes now
                    await self._forget_script(keys=[members, key(name)], args=[name])
        return {name: msgspec.json.decode(raw, type=kind) for name, raw in zip(ordered, found, strict=True) if raw}

    # Changes.

    async def apply(self, puts: Sequence[Put], actor: str) -> Commit:
        return await self.transact(lambda snapshot: apply_edit(snapshot, puts), actor)

    async def delete(self, kind: str, name: str, *, force: bool = False, actor: str) -> Commit:
        return await self.transact(lambda snapshot: delete_edit(snapshot, ObjectKey(kind, name), force=force), actor)

    async def switch_route(self, route: str, to_model: str, *, generation: int = 0, actor: str) -> Commit:
        return await self.transact(lambda snapshot: switch_edit(snapshot, route, to_model, generation), actor)

    async def rollback_route(self, route: str, actor: str) -> Commit:
        return await self.transact(lambda snapshot: rollback_edit(snapshot, route), actor)

    async def transact(self, edit: Edit, actor: str) -> Commit:
        """Runs a pure edit against the newest snapshot and commits its writes, all or none.

        The script refuses when the site has changed since the snapshot, so what the edit validated holds at the moment
        of the write; then the edit runs again on a fresh one. Raises what the edit raises; CONFLICT after ATTEMPTS.
        """
        try:
            for attempt in range(ATTEMPTS):
                await asyncio.sleep(random.uniform(0, 0.005) * attempt)
                snapshot = await self.snapshot()
                writes = tuple(edit(snapshot))
                changed = [write for write in writes if write.action != "unchanged"]
                if not changed:
                    return Commit(snapshot.revision, writes)
                answer = await self._commit(snapshot.revision, changed, actor)
                if answer[0] == b"ok":
                    return Commit(int(answer[1]), writes)
        except LOST as error:
            raise refused(error, "the change") from error
        raise YardError(ErrorCode.CONFLICT, f"others changed the site {ATTEMPTS} times in between; repeat the change")

    async def _commit(self, revision: int, writes: Sequence[Write], actor: str) -> list[Any]:
        now = time.time()
        keys = [self.keys.revision, self.keys.audit, self.keys.tombstones, self.keys.identity]
        args: list[str | bytes | int | float] = [revision, self.keys.changes, actor, now, AUDIT_ENTRIES, uuid.uuid4().hex]
        for write in writes:
            keys.append(self.keys.desired(write.key.kind))
            stored = write.before.generation if write.before else 0
            args += [write.key.kind, write.key.name, stored, write.generation, b"", write.action]
            if write.document is not None:
                args[-2] = msgspec.json.encode(
                    DesiredObject(
                        kind=write.key.kind,
                        name=write.key.name,
                        generation=write.generation,
                        revision=revision + 1,
                        manifest=write.document,
                        updated_unix=now,
                        actor=actor,
                        previous=write.previous,
                    )
                )
        return await self._desired_script(keys=keys, args=args)

    async def give_back(self, held: Snapshot, stored: Snapshot, actor: str) -> int:
        """Writes what the store lost and this process still holds, if it is still the same store; how many names that was."""
        if not lost_names(held, stored):
            return 0
        return max(0, await self._restore(held, stored, actor, expected=stored.identity, identity=""))

    async def restore(self, held: Snapshot, actor: str) -> int:
        """Writes whatever the store has not or has older, into any store, which then counts as the one it was taken from."""
        stored = await self.snapshot()
        ids = [*held.identity.split(","), *stored.identity.split(",")]
        known = [each for each in dict.fromkeys(ids) if each and (f"-{each}" not in ids)]
        return await self._restore(held, stored, actor, expected="", identity=",".join(known) or uuid.uuid4().hex)

    async def give_up(self, held: Snapshot, actor: str) -> None:
        """Takes the store as it is for the site; whoever holds what it held before drops that."""
        stored = await self.snapshot()
        kept = [each for each in stored.identity.split(",") if each] or [uuid.uuid4().hex]
        dropped = [f"-{each}" for each in held.identity.split(",") if each and each not in kept]
        await self._restore(Snapshot(), stored, actor, expected="", identity=",".join(dict.fromkeys([*kept, *dropped])))

    async def _restore(self, held: Snapshot, stored: Snapshot, actor: str, *, expected: str, identity: str) -> int:
        lost = sorted(lost_names(held, stored))
        keys = [self.keys.revision, self.keys.audit, self.keys.tombstones, self.keys.identity]
        keys += [self.keys.desired(key.kind) for key in lost]
        args: list[Any] = [held.revision, self.keys.changes, actor, time.time(), AUDIT_ENTRIES, expected, identity]
        for key in lost:
            kept = held.objects.get(key)
            args += [key.kind, key.name, held.generation(key), msgspec.json.encode(kept) if kept else b""]
        return int(await self._restore_script(keys=keys, args=args))


def script_text(name: str) -> str:
    return files("gateway.state").joinpath(f"{name}.lua").read_text(encoding="utf-8")
