"""What a driver tells Redis, and that it serves on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from conftest import PoolFactory, assignment, until
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from valkey_server import ValkeyServer

from gateway.api.records import HEARTBEAT_TTL_S, Keys, PoolRecord
from gateway.api.redis_link import connect
from workers.driver.canary import AnswerStore
from workers.driver.heartbeat import Heartbeat


def record(**changes: object) -> PoolRecord:
    base = PoolRecord("p", "127.0.0.1:1", "i", "n", 1, "cpu", fence=0, revision=0, heartbeat_unix=0.0)
    return msgspec.structs.replace(base, **changes)


async def test_the_record_lives_as_long_as_its_driver_says_so(valkey: ValkeyServer, site: str) -> None:
    redis, keys = connect(valkey.url), Keys(site)
    heartbeat = Heartbeat(valkey.url, site, "p", "driver/p")
    running = asyncio.create_task(heartbeat.run(lambda: record(message="hello")))
    await until_redis(redis, keys.pool("p"))
    stored = msgspec.json.decode(await redis.get(keys.pool("p")), type=PoolRecord)
    assert stored.message == "hello"
    assert 0 < await redis.pttl(keys.pool("p")) <= HEARTBEAT_TTL_S * 1000
    assert await redis.smembers(keys.pools) == {b"p"}  # type: ignore[misc]
    running.cancel()
    await heartbeat.withdraw()
    assert await redis.get(keys.pool("p")) is None
    await heartbeat.close()
    await redis.aclose()


async def test_a_change_is_published_before_the_next_heartbeat(valkey: ValkeyServer, site: str) -> None:
    redis, keys = connect(valkey.url, call_timeout_s=None), Keys(site)
    heartbeat = Heartbeat(valkey.url, site, "p", "driver/p")
    async with redis.pubsub() as channel:
        await channel.subscribe(keys.observed)
        running = asyncio.create_task(heartbeat.run(record))
        await message(channel, 5.0)
        heartbeat.event("ready", "m", "group 1")
        assert await message(channel, 0.5) == b"pool:p"
        running.cancel()
    entries = await redis.xrange(keys.events)
    assert entries[-1][1] == {
        b"kind": b"model.ready",
        b"subject": b"Model/m",
        b"message": b"group 1",
        b"actor": b"driver/p",
        b"detail": b"pool p",
    }
    await heartbeat.close()
    await redis.aclose()


async def test_without_redis_a_pool_serves_and_tells_later(make_pool: PoolFactory, own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12."""
    pool = await make_pool(assignment(), redis_url=own_valkey.url, site=site)
    link = await pool.link()
    own_valkey.stop()
    await until(lambda: not pool.driver._heartbeat.reachable, pool.driver.record, 20)
    number = await link.submit([5, 6])
    assert (await link.end_of(number)).finish_reason == "length"
    await pool.assign(assignment(), assignment("late"))
    await pool.until_ready()
    pool.driver.check_health()
    own_valkey.start()
    await until(lambda: pool.driver._heartbeat.reachable, pool.driver.record, 20)
    redis = connect(own_valkey.url)
    messages = [entry[b"subject"] for _, entry in await redis.xrange(Keys(site).events)]
    assert b"Model/late" in messages
    await redis.aclose()


async def test_a_restarted_driver_knows_the_newest_fence(valkey: ValkeyServer, site: str) -> None:
    redis = connect(valkey.url)
    await redis.set(Keys(site).fence, 41)
    heartbeat = Heartbeat(valkey.url, site, "p", "driver/p")
    assert await heartbeat.newest_fence() == 41
    await heartbeat.close()
    await redis.aclose()


async def test_whether_a_pool_is_deleted_is_what_redis_says(own_valkey: ValkeyServer, site: str) -> None:
    redis = connect(own_valkey.url)
    heartbeat = Heartbeat(own_valkey.url, site, "p", "driver/p")
    assert await heartbeat.pool_is_deleted()
    await redis.hset(Keys(site).desired("Pool"), "p", "{}")  # type: ignore[misc]
    assert not await heartbeat.pool_is_deleted()
    own_valkey.stop()
    assert not await heartbeat.pool_is_deleted(), "ranks stay where Redis does not say"
    await heartbeat.close()
    await redis.aclose()


async def test_the_first_answer_of_a_placement_is_kept_for_all_pools(own_valkey: ValkeyServer, site: str, tmp_path: Path) -> None:
    """Rule 8, and rule 12: without Redis the local copy decides."""
    here, there = (AnswerStore(own_valkey.url, site, tmp_path / name) for name in ("here", "there"))
    assert await here.first("digest|torch", "Paris") == "Paris"
    assert await there.first("digest|torch", "Lyon") == "Paris"
    assert await there.first("digest|other", "Lyon") == "Lyon"
    own_valkey.stop()
    assert await there.first("digest|torch", "Lyon") == "Paris"
    assert await here.first("digest|new", "Rome") == "Rome"
    for store in (here, there):
        await store.close()


async def until_redis(redis: Redis, key: str) -> None:
    for _ in range(200):
        if await redis.exists(key):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"{key} does not appear")


async def message(channel: PubSub, timeout_s: float) -> bytes:
    async with asyncio.timeout(timeout_s):
        async for item in channel.listen():
            if item["type"] == "message":
                return item["data"]
    raise AssertionError("no message")
