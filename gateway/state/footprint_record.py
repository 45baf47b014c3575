"""The stored footprints: what loads really took. Written by the controller that holds the lease, and by it alone."""

from __future__ import annotations

import msgspec

from gateway.api.records import FootprintRecord
from gateway.state.lease import Lease
from gateway.state.store import SiteStore


async def load_footprints(store: SiteStore) -> tuple[FootprintRecord, ...]:
    """Empty also when another version has written what this one cannot read: it is measured again."""
    raw = await store.redis.get(store.keys.footprints)
    try:
        return msgspec.json.decode(raw, type=tuple[FootprintRecord, ...]) if raw else ()
    except msgspec.MsgspecError:
        return ()


async def save_footprints(store: SiteStore, lease: Lease, footprints: tuple[FootprintRecord, ...]) -> bool:
    """False when the lease is lost; then nothing was written."""
    return await lease.write(store.keys.footprints, msgspec.json.encode(footprints))
