"""The stored placement: which worker groups belong where. Written by the controller that holds the lease, and by it alone."""

from __future__ import annotations

import msgspec

from gateway.state.lease import Lease
from gateway.state.store import SiteStore
from placement.types import PlacedGroup


async def load_placement(store: SiteStore) -> tuple[PlacedGroup, ...] | None:
    """None when there is none."""
    raw = await store.redis.get(store.keys.placement)
    return msgspec.json.decode(raw, type=tuple[PlacedGroup, ...]) if raw else None


async def save_placement(store: SiteStore, lease: Lease, groups: tuple[PlacedGroup, ...]) -> bool:
    """False when the lease is lost; then nothing was written."""
    return await lease.write(store.keys.placement, msgspec.json.encode(groups))
