"""What loads really took: gathered from what drivers report, kept for the loads that follow. Pure.

Placement then counts by it, and the assignment carries it to the driver, which reserves by the same figure: what was measured
is mostly less than the estimate, and a reload that reserved by the estimate would find less room than the plan saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from gateway.api.records import FootprintRecord, PoolRecord
from gateway.controller.model_requests import AskedModel
from placement.types import Measured

KEPT = 1_000

Footprints = tuple[FootprintRecord, ...]


def remember(known: Footprints, pools: Iterable[PoolRecord]) -> Footprints:
    """With what these pools report: of loads of one sort the most, of two versions of an engine the newer. At most KEPT; those
    that changed last are kept."""
    merged = {seen.sort: seen for seen in known}
    for pool in pools:
        for found in pool.footprints:
            before = merged.get(found.sort)
            now = _most(before, found) if before is not None and before.version == found.version else found
            if now != before:
                merged.pop(found.sort, None)
                merged[found.sort] = now
    return tuple(merged.values())[-KEPT:]


def with_measured(models: Mapping[str, AskedModel], known: Footprints, pools: Iterable[PoolRecord]) -> dict[str, AskedModel]:
    """Each model with what was measured of it, by engines of the versions that the pools have."""
    records = tuple(pools)
    versions: dict[str, set[str]] = {}
    types: dict[str, set[str]] = {}
    for record in records:
        types.setdefault(record.device, set()).update(rank.type for rank in record.ranks)
        for engine, version in record.engine_versions.items():
            versions.setdefault(engine, set()).add(version)
    by_digest: dict[str, list[FootprintRecord]] = {}
    for seen in known:
        if seen.version in versions.get(seen.engine, {seen.version}):
            by_digest.setdefault(seen.digest, []).append(seen)
    return {name: _enriched(asked, by_digest.get(asked.digest, []), types) for name, asked in models.items()}


def _enriched(asked: AskedModel, known: list[FootprintRecord], types: Mapping[str, set[str]]) -> AskedModel:
    request = asked.request
    if request is None or not known:
        return asked
    limits = (request.batch_tokens, request.concurrency, request.context)
    found = [seen for seen in known if (seen.batch_tokens, seen.concurrency, seen.context) == limits]
    measured = [_measured(seen) for seen in found]
    alike: dict[tuple[str, str, int, int, str], list[FootprintRecord]] = {}
    for seen in found:
        degrees = (seen.tensor_parallel, seen.pipeline_parallel)
        alike.setdefault((seen.engine, seen.precision, *degrees, seen.device), []).append(seen)
    for members in alike.values():
        # Where a group goes is not known before it is placed: counted by the type that takes most, once all were measured.
        of_types = {seen.type for seen in members}
        if "" not in of_types and of_types >= types.get(members[0].device, set()):
            most = members[0]
            for seen in members[1:]:
                most = _most(most, seen)
            measured.append(replace(_measured(most), type=""))
    return replace(asked, request=replace(request, measured=tuple(measured)))


def _measured(seen: FootprintRecord) -> Measured:
    degrees = (seen.tensor_parallel, seen.pipeline_parallel)
    return Measured(seen.engine, seen.precision, *degrees, seen.device, seen.weights, seen.workspace, seen.type)


def _most(one: FootprintRecord, other: FootprintRecord) -> FootprintRecord:
    return msgspec.structs.replace(
        other,
        weights=tuple(map(max, one.weights, other.weights)),
        workspace=tuple(map(max, one.workspace, other.workspace)),
    )
