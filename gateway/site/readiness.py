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
    failures: Mapping[str, str]  # model -> why; may still heal, see FailureWatch

    @property
    def is_ready(self) -> bool:
        return not self.failures and all(line.is_done for line in self.lines)

    @property
    def missing(self) -> str:
        """What is not there yet, in one line."""
        return "; ".join(f"{line.subject}: {line.note}" for line in self.lines if not line.is_done)


class FailureWatch:
    """Tells failures that last from those that heal: a driver tries a failed model again after a growing while."""

    def __init__(self, grace_s: float, attempts: int = 2) -> None:
        self._grace_s, self._attempts = grace_s, attempts
        self._since_s: dict[str, float] = {}
        self._reasons: dict[str, set[str]] = {}

    def final(self, failures: Mapping[str, str], now_s: float) -> list[str]:
        """Failures of models that failed for `grace_s` on end, or that often in different attempts."""
        self._since_s = {model: self._since_s.get(model, now_s) for model in failures}
        for model, reason in failures.items():
            self._reasons.setdefault(model, set()).add(reason)
        return [
            reason
            for model, reason in failures.items()
            if now_s - self._since_s[model] >= self._grace_s or len(self._reasons[model]) >= self._attempts
        ]


def judge(status: SiteStatus, pools: Mapping[str, PoolSpec], replicas: Mapping[str, int]) -> Readiness:
    """`pools` and `replicas` (model -> worker groups): what must be there for the site to be up."""
    records = {record.pool: record for record in status.pools}
    lines: list[Line] = []
    failures: dict[str, str] = {}
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
        for group in groups:
            if group.state == "failed":
                failures[model] = f"model {model}: {group.reason or 'failed without a reason'}"
        ready = sum(group.state in ("ready", "parked") for group in groups)
        if model in unplaced and ready < wanted and all(line.is_done for line in lines[: len(pools)]):
            failures[model] = f"model {model} has no place: {'; '.join(unplaced[model])}"
    return Readiness(tuple(lines), failures)


def _pool_line(name: str, devices: int, record: PoolRecord | None) -> Line:
    if record is None:
        return Line(f"pool {name}", "starting its driver", None, False)
    alive = sum(rank.alive for rank in record.ranks)
    message = f" · {record.message}" if record.message else ""
    return Line(f"pool {name}", f"{alive} of {devices} ranks{message}", alive / devices, alive >= devices)


def _model_line(model: str, wanted: int, groups: list[GroupRecord]) -> Line:
    ready = sum(group.state in ("ready", "parked") for group in groups)
    if ready >= wanted:
        return Line(f"model {model}", "ready", 1.0, True)
    if not groups:
        return Line(f"model {model}", "waiting for its place", None, False)
    least = min(groups, key=lambda group: group.progress if group.state == "loading" else _STATE_FRACTION.get(group.state, 0.0))
    fraction = least.progress if least.state == "loading" else _STATE_FRACTION.get(least.state)
    note = least.state + (f" {fraction:.0%}" if least.state == "loading" and fraction else "")
    note += (f": {least.reason}" if least.reason else "") + (f" ({ready} of {wanted} ready)" if wanted > 1 else "")
    return Line(f"model {model}", note, fraction, False)
