"""Decides, from one status of the site, whether it serves what it should, is on its way, or has failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.api.config import PoolSpec
from gateway.api.records import GroupRecord, PoolRecord, SiteStatus

# Share of a model's way that each state stands for, where the driver reports no better fraction.
_STATE_FRACTION = {"waiting": 0.0, "loading": 0.0, "checking": 0.95, "ready": 1.0}


@dataclass(frozen=True, slots=True)
class Line:
    """What one pool or model is doing."""

    subject: str
    note: str
    fraction: float | None
    is_done: bool


@dataclass(frozen=True, slots=True)
class Readiness:
    lines: tuple[Line, ...]
    failures: tuple[str, ...]  # may still heal; the caller decides how long to wait for that

    @property
    def is_ready(self) -> bool:
        return not self.failures and all(line.is_done for line in self.lines)


def judge(status: SiteStatus, pools: Mapping[str, PoolSpec], replicas: Mapping[str, int]) -> Readiness:
    """`pools` and `replicas` (model -> worker groups): what must be there for the site to be up."""
    records = {record.pool: record for record in status.pools}
    lines: list[Line] = []
    failures: list[str] = []
    for name, spec in pools.items():
        lines.append(_pool_line(name, spec.devices, records.get(name)))
    generations = {item.name: item.generation for item in status.models}
    unplaced = status.controller.unplaced if status.controller else {}
    for model, wanted in replicas.items():
        groups = [
            group
            for record in status.pools
            for group in record.groups
            if group.model == model and group.generation >= generations.get(model, 0)
        ]
        lines.append(_model_line(model, wanted, groups))
        failures += [f"model {model}: {group.reason or 'failed without a reason'}" for group in groups if group.state == "failed"]
        ready = sum(group.state == "ready" for group in groups)
        if model in unplaced and ready < wanted and all(line.is_done for line in lines[: len(pools)]):
            failures.append(f"model {model} has no place: {'; '.join(unplaced[model])}")
    return Readiness(tuple(lines), tuple(dict.fromkeys(failures)))


def _pool_line(name: str, devices: int, record: PoolRecord | None) -> Line:
    if record is None:
        return Line(f"pool {name}", "starting its driver", None, False)
    alive = sum(rank.alive for rank in record.ranks)
    message = f" · {record.message}" if record.message else ""
    return Line(f"pool {name}", f"{alive} of {devices} ranks{message}", alive / devices, alive >= devices)


def _model_line(model: str, wanted: int, groups: list[GroupRecord]) -> Line:
    ready = sum(group.state == "ready" for group in groups)
    if ready >= wanted:
        return Line(f"model {model}", "ready", 1.0, True)
    if not groups:
        return Line(f"model {model}", "waiting for its place", None, False)
    least = min(groups, key=lambda group: group.progress if group.state == "loading" else _STATE_FRACTION.get(group.state, 0.0))
    fraction = least.progress if least.state == "loading" else _STATE_FRACTION.get(least.state)
    note = least.state + (f" {fraction:.0%}" if least.state == "loading" and fraction else "")
    note += (f": {least.reason}" if least.reason else "") + (f" ({ready} of {wanted} ready)" if wanted > 1 else "")
    return Line(f"model {model}", note, fraction, False)
