"""How many devices a load needs at its SLOs: the fewest whose simulation is good enough. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from placement.outcome import Outcome
from placement.packing import place
from placement.simulation import Queue, Settings, Simulation
from placement.speed import Speed, group_speed
from placement.types import Arrival, Device, Load, ModelRequest, Plan, Snapshot

_WINDOW_S = 60.0  # over which a peak is taken
_ROUNDS = 4
_FULL = 0.8  # of what a group computes, what replicas are counted for: queues grow long near 1


@dataclass(frozen=True)
class Capacity:
    """One number of devices that was tried. `outcome` is None where not all models have a place."""

    devices: int
    replicas: dict[str, int]
    outcome: Outcome | None

    def reaches(self, target: float) -> bool:
        return self.outcome is not None and self.outcome.within_slo >= target


def fewest(
    snapshot: Snapshot,
    trace: Sequence[Arrival],
    target: float,
    queues: Callable[[ModelRequest], Queue],
    settings: Settings,
    most: int = 1024,
) -> tuple[Capacity, ...]:
    """What was tried, the answer last: doubling until it is enough, then halving what is between. The last of them does not
    reach the target when even `most` devices do not.
    """
    site = with_load(snapshot, trace, settings.speeds)
    tried: list[Capacity] = []

    def attempt(count: int) -> Capacity:
        tried.append(_with_devices(site, count, trace, target, queues, settings))
        return tried[-1]

    enough = 1
    while not attempt(enough).reaches(target) and enough < most:
        enough = min(enough * 2, most)
    low, high = enough // 2, enough
    while tried[-1].reaches(target) and high - low > 1:
        middle = (low + high) // 2
        if not attempt(middle).reaches(target):
            low = middle
            tried.append(next(each for each in tried if each.devices == high))
        else:
            high = middle
    return tuple(tried)


def expected_loads(trace: Sequence[Arrival], speeds: Mapping[str, tuple[Speed, int]]) -> dict[str, Load]:
    """Mean and peak of what each model is asked, in tokens of answers, as placement wants them: prompts count as so many
    tokens as would take the same time. `speeds`: of one group of each model, and how many sequences it runs at once.
    """
    if not trace:
        return {}
    seconds = max(trace[-1].time_s - trace[0].time_s, 1.0)
    window_s = min(_WINDOW_S, seconds)
    windows: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for time_s, model, prompt, output in trace:
        if model in speeds:
            speed, batch = speeds[model]
            windows[model][int(time_s // window_s)] += output + prompt * speed.prompt_token_s * speed.tokens_per_s(batch)
    loads = {}
    for model, sums in windows.items():
        mean = sum(sums.values()) / seconds
        loads[model] = Load(mean, max(mean, max(sums.values()) / window_s))
    return loads


def with_load(snapshot: Snapshot, trace: Sequence[Arrival], speeds: Mapping[str, Speed] | None = None) -> Snapshot:
    """Each model with the load that the trace has for it, and so many replicas as carry it; never fewer than it asks for."""
    kinds = sorted({(device.kind, device.type) for device in snapshot.devices})
    known: dict[str, tuple[Speed, int]] = {}
    for request in snapshot.models:
        degrees = (request.tensor_parallel or 1, request.pipeline_parallel or 1)
        able = [group_speed(request, *degrees, *each) for each in kinds if request.device in (None, each[0])]
        if speeds and request.name in speeds:
            able = [speeds[request.name]]
        if able:
            slowest = min(able, key=lambda speed: speed.tokens_per_s(request.concurrency))
            known[request.name] = (slowest, request.concurrency)
    loads = expected_loads(trace, known)
    models = []
    for request in snapshot.models:
        load = loads.get(request.name)
        if load is not None:
            speed, batch = known[request.name]
            needed = ceil(load.peak_tokens_per_s / (speed.tokens_per_s(batch) * _FULL))
            request = replace(request, load=load, replicas=max(request.replicas, needed))
        models.append(request)
    return replace(snapshot, models=tuple(models))


def _with_devices(
    snapshot: Snapshot,
    count: int,
    trace: Sequence[Arrival],
    target: float,
    queues: Callable[[ModelRequest], Queue],
    settings: Settings,
) -> Capacity:
    """With replicas by load; then a few times with half as many more of the models that miss the target."""
    site = replace(snapshot, devices=_devices(snapshot.devices, count), placed=())
    wanted = {request.name: request.replicas for request in snapshot.models}
    best: Capacity | None = None
    for _ in range(_ROUNDS):
        # More replicas than devices add nothing: two of one model never share a device.
        replicas = {name: min(number, count) for name, number in wanted.items()}
        models = tuple(replace(request, replicas=replicas[request.name]) for request in snapshot.models)
        trial = replace(site, models=models)
        plan = place(trial)
        if best is not None and replicas == best.replicas:
            break
        if any(not _placed(plan, request) for request in models if request.replicas):
            return best or Capacity(count, replicas, None)
        found = Capacity(count, replicas, Simulation(trial, plan, queues, settings).run(trace))
        if best is None or (found.outcome and best.outcome and found.outcome.within_slo > best.outcome.within_slo):
            best = found
        if found.reaches(target) or found.outcome is None:
            break
        for row in found.outcome.models:
            if row.within_slo < target and row.requests:
                wanted[row.model] = replicas[row.model] + -(-replicas[row.model] // 2)
    return best or Capacity(count, wanted, None)


def _placed(plan: Plan, request: ModelRequest) -> bool:
    return any(group.model == request.name for group in plan.groups)


def _devices(template: tuple[Device, ...], count: int) -> tuple[Device, ...]:
    """The first `count` devices; beyond the site's own, its nodes over and over."""
    devices = []
    for index in range(count):
        round_, at = divmod(index, len(template))
        device = template[at]
        rank = device.rank + round_ * (max(each.rank for each in template if each.pool == device.pool) + 1)
        devices.append(replace(device, rank=rank, node=f"{device.node}+{round_}" if round_ else device.node))
    return tuple(devices)
