from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from valkey_server import ValkeyServer

from gateway.state.connection import LOST
from gateway.state.lease import Lease
from gateway.state.placement_record import load_placement, save_placement
from gateway.state.store import SiteStore
from placement.types import PlacedGroup

GROUP = PlacedGroup("m", "p", (0,), 1, 1, (10,))


@pytest.fixture
async def store(valkey: ValkeyServer, site: str) -> AsyncIterator[SiteStore]:
    opened = SiteStore(valkey.url, site)
    yield opened
    await opened.close()


async def test_rule_1_one_of_two_controllers_holds_the_lease(store: SiteStore) -> None:
    """Rule 1: the second waits until the first lets go or is silent, and then has a higher fencing token."""
    first, second = Lease(store, "first", ttl_s=0.4), Lease(store, "second", ttl_s=0.4)
    fence = await first.hold()
    assert fence > 0
    assert await second.hold() == 0
    assert await first.hold() == fence, "renewing keeps the token"
    await first.release()
    assert await second.hold() == fence + 1
    await asyncio.sleep(0.5)  # The second is silent for longer than its lease.
    await first.hold()
    assert first.fence == fence + 2


async def test_the_holder_stops_before_another_can_begin(store: SiteStore) -> None:
    first, second = Lease(store, "first", ttl_s=0.4), Lease(store, "second", ttl_s=0.4)
    await first.hold()
    await asyncio.sleep(0.32)
    assert await second.hold() == 0
    assert first.fence == 0


async def test_rule_1_a_controller_that_lost_its_lease_writes_nothing(store: SiteStore) -> None:
    """Rule 1: a process that was stopped for a while and believes that it holds the lease is refused by the store itself."""
    stopped, other = Lease(store, "stopped", ttl_s=60), Lease(store, "other")
    await stopped.hold()
    await store.redis.delete(store.keys.lease)
    await other.hold()
    assert stopped.fence, "it does not know yet"
    assert not await save_placement(store, stopped, (GROUP,))
    assert stopped.fence == 0
    assert await load_placement(store) is None
    assert await save_placement(store, other, (GROUP,))
    assert await load_placement(store) == (GROUP,)


async def test_a_flushed_counter_gives_no_token_that_drivers_have_seen(store: SiteStore) -> None:
    lease = Lease(store, "first")
    await lease.hold()
    await store.redis.delete(store.keys.fence, store.keys.lease)
    assert await lease.hold(seen_fence=41) == 42
    assert await lease.hold(seen_fence=42) == 42
    assert await lease.hold(seen_fence=50) == 51, "a driver has seen a newer one: it would refuse ours"


async def test_rule_12_a_lease_ends_by_itself_without_redis(own_valkey: ValkeyServer, site: str) -> None:
    """Rule 12: a controller that cannot reach Redis acts no longer than its lease."""
    store = SiteStore(own_valkey.url, site)
    lease = Lease(store, "first", ttl_s=0.4)
    await lease.hold()
    own_valkey.pause()
    with pytest.raises(LOST):
        await lease.hold()
    assert lease.fence == 0
    own_valkey.resume()
    await store.close()
