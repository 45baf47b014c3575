"""Models whose servers run elsewhere, as the site's gateways report them together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gateway.api.records import GatewayRecord, GroupRecord

ELSEWHERE = "elsewhere"
"""Stands where a pool's name would."""


def server_groups(gateways: Iterable[GatewayRecord]) -> Mapping[str, GroupRecord]:
    """By model. It is ready while one gateway reaches its server; then the reason says which do not."""
    seen: dict[str, list[tuple[str, GroupRecord]]] = {}
    for gateway in gateways:
        for group in gateway.servers:
            seen.setdefault(group.model, []).append((gateway.gateway, group))
    return {model: _together(reports) for model, reports in seen.items()}


def _together(reports: list[tuple[str, GroupRecord]]) -> GroupRecord:
    newest = max(group.generation for _, group in reports)
    reports = [(gateway, group) for gateway, group in reports if group.generation == newest]
    ready = [group for _, group in reports if group.state == "ready"]
    troubles = [(gateway, group.reason) for gateway, group in reports if group.state != "ready"]
    reasons = [f"not from gateway {gateway}: {reason}" for gateway, reason in troubles] if ready else [troubles[0][1]]
    best = ready[0] if ready else reports[0][1]
    return msgspec.structs.replace(
        best,
        reason="; ".join(reasons),
        running=sum(group.running for _, group in reports),
        outstanding_tokens=sum(group.outstanding_tokens for _, group in reports),
    )
