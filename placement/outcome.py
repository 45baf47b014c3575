"""What a simulated site did: requests by model against their SLOs, and memory, switches and SLOs over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.simulated_group import Job, SimulatedGroup
from placement.types import ModelRequest, Slo


@dataclass(frozen=True)
class ModelOutcome:
    model: str
    requests: int
    refused: int
    within_slo: float  # share of all requests; refused ones are not within
    first_token_p50_s: float
    first_token_p99_s: float
    token_p50_s: float
    output_tokens: int


@dataclass(frozen=True)
class Sample:
    """One interval. `within_slo`: of the requests that ended or were refused in it; None without any."""

    time_s: float
    resident_bytes: int
    kv_bytes: int
    switches: int  # wakes, in the interval
    running: int
    within_slo: float | None


@dataclass(frozen=True)
class Outcome:
    models: tuple[ModelOutcome, ...]
    samples: tuple[Sample, ...]
    requests: int
    within_slo: float
    switches: int
    busy_share: float  # of the time of all devices
    seconds: float
    unknown: int  # requests for models that the site has not


class Recorder:
    def __init__(self, models: Sequence[ModelRequest], devices: int, slo: Slo, sample_s: float) -> None:
        self._models = models
        self._devices = devices
        slos = [request.slo or slo for request in models]
        self._first = [each.first_token_s if each.first_token_s is not None else float("inf") for each in slos]
        self._token = [each.token_s if each.token_s is not None else float("inf") for each in slos]
        self._first_s: list[list[float]] = [[] for _ in models]
        self._token_s: list[list[float]] = [[] for _ in models]
        self._within = [0] * len(models)
        self._refused = [0] * len(models)
        self._tokens = [0] * len(models)
        self._sample_s = sample_s
        self._samples: list[Sample] = []
        self._ended_lately = self._within_lately = self._switches = 0
        self._last_s = 0.0
        self.next_sample_s = sample_s
        self.unknown = 0

    def ended(self, job: Job, now: float) -> None:
        model = job.model
        first_s = job.first_s + job.late_s - job.arrived_s
        token_s = (now - job.first_s) / (job.output - 1) if job.output > 1 else 0.0
        self._first_s[model].append(first_s)
        self._token_s[model].append(token_s)
        self._tokens[model] += job.output
        self._ended_lately += 1
        self._last_s = now
        if first_s <= self._first[model] and token_s <= self._token[model]:
            self._within[model] += 1
            self._within_lately += 1

    def refused(self, job: Job, now: float) -> None:
        self._refused[job.model] += 1
        self._ended_lately += 1
        self._last_s = max(self._last_s, now)

    def sample(self, now: float, resident: Sequence[int], kv_bytes: int, switches: int, groups: Sequence[SimulatedGroup]) -> None:
        """The interval before `now`; intervals without an event are left out."""
        share = self._within_lately / self._ended_lately if self._ended_lately else None
        running = sum(group.inside for group in groups)
        at = now - now % self._sample_s
        self._samples.append(Sample(at, sum(resident), kv_bytes, switches - self._switches, running, share))
        self._ended_lately = self._within_lately = 0
        self._switches = switches
        self.next_sample_s = at + self._sample_s

    def outcome(self, groups: Sequence[SimulatedGroup], switches: int) -> Outcome:
        rows = []
        for index, request in enumerate(self._models):
            first, token = sorted(self._first_s[index]), sorted(self._token_s[index])
            requests = len(first) + self._refused[index]
            rows.append(
                ModelOutcome(
                    request.name,
                    requests,
                    self._refused[index],
                    self._within[index] / requests if requests else 1.0,
                    _percentile(first, 0.5),
                    _percentile(first, 0.99),
                    _percentile(token, 0.5),
                    self._tokens[index],
                )
            )
        total = sum(row.requests for row in rows)
        busy = sum(group.busy_s * len(group.places) for group in groups)
        return Outcome(
            models=tuple(rows),
            samples=tuple(self._samples),
            requests=total,
            within_slo=sum(self._within) / total if total else 1.0,
            switches=switches,
            busy_share=busy / (self._devices * self._last_s) if self._last_s and self._devices else 0.0,
            seconds=self._last_s,
            unknown=self.unknown,
        )


def _percentile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)] if ascending else 0.0
