"""Replays a trace through a planned site: the gateway's queues, the pools' batching, and who is in memory when. Pure.

The decisions are those of a running site: where models are is `packing`, who leaves memory for whom is `parking`, who is let
through next is the queue that the caller hands in (the gateway's own). Only the work is simulated, by the cost model.

    arrival ──▶ its model's queue ──room──▶ the group with the least to do ──▶ prompt, then tokens ──▶ its end makes room
                                     └── none in memory: held; the group is woken, and parks idle ones for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from placement.footprint import kv_bytes
from placement.outcome import Outcome, Recorder
from placement.simulated_group import NEVER, Job, SimulatedGroup
from placement.simulated_memory import SimulatedMemory
from placement.speed import Speed, group_speed
from placement.types import Arrival, Device, ModelRequest, PlacedGroup, Plan, Slo, Snapshot

OVERCOMMIT = 2
"""Requests that a gateway lets through to a group, by what it computes at once; the rest wait at the gateway."""


class Queue(Protocol):
    """Where requests of one model wait for their turn."""

    def __len__(self) -> int: ...
    def push(self, job: Job, cost: float, now_s: float) -> Job | None:
        """Who is refused for it, which may be itself."""
        ...

    def pop(self, now_s: float) -> Job | None: ...


@dataclass(frozen=True)
class Settings:
    """`slo` is for models that promise nothing themselves; `overhead_s` what a request takes beside computing; `speeds` by
    model replace the cost model's.
    """

    slo: Slo = field(default_factory=lambda: Slo(first_token_s=2.0, token_s=0.2))
    overhead_s: float = 0.005
    sample_s: float = 1.0
    speeds: Mapping[str, Speed] | None = None


class _Model:
    __slots__ = ("arrived", "concurrency", "groups", "held", "index", "inside", "queue", "request", "room")

    def __init__(self, index: int, request: ModelRequest, queue: Queue) -> None:
        self.index = index
        self.request = request
        self.queue = queue
        self.groups: list[SimulatedGroup] = []
        self.held: list[Job] = []
        self.inside = 0
        self.room = 0


class Simulation:
    def __init__(
        self, snapshot: Snapshot, plan: Plan, queues: Callable[[ModelRequest], Queue], settings: Settings | None = None
    ) -> None:
        self._settings = settings or Settings()
        devices = {(device.pool, device.rank): index for index, device in enumerate(snapshot.devices)}
        self._models = {request.name: _Model(index, request, queues(request)) for index, request in enumerate(snapshot.models)}
        self._by_index = list(self._models.values())
        self._groups: list[SimulatedGroup] = []
        self._on: list[list[SimulatedGroup]] = [[] for _ in snapshot.devices]
        self._events: list[tuple[float, int, SimulatedGroup | None, int]] = []
        self._number = count()
        self._held: set[_Model] = set()  # those with requests that wait for a wake
        requests = [model.request for model in self._by_index]
        self.memory = SimulatedMemory(snapshot.devices, self._at)
        for placed in sorted(plan.groups, key=lambda group: (group.model, group.pool, group.ranks)):
            self._enter(placed, snapshot.devices, devices)
        for group in self._groups:
            others = {other.index: other for place in group.places for other in self._on[place] if other is not group}
            group.beside = tuple(others.values())
        for model in self._by_index:
            model.room = OVERCOMMIT * model.request.concurrency * len(model.groups)
        self._recorder = Recorder(requests, len(snapshot.devices), self._settings.slo, self._settings.sample_s)

    def _enter(self, placed: PlacedGroup, devices: Sequence[Device], index_of: Mapping[tuple[str, int], int]) -> None:
        model = self._models[placed.model]
        request, places = model.request, tuple(index_of[placed.pool, rank] for rank in placed.ranks)
        device = devices[places[0]]
        degrees = (placed.tensor_parallel, placed.pipeline_parallel)
        speed = (self._settings.speeds or {}).get(placed.model) or group_speed(request, *degrees, device.kind, device.type)
        per_token = max(kv_bytes(request, *degrees, stage, 1024) / 1024 for stage in range(placed.pipeline_parallel))
        # Its keys and values may grow to its ceiling, else to what its limits need and its devices could give.
        most = (request.kv_ceiling_bytes or request.concurrency * request.context * per_token) / max(per_token, 1e-9)
        least_free = min(devices[at].capacity_bytes - devices[at].foreign_bytes for at in places) - max(placed.bytes_per_rank)
        limit = int(min(most, max(least_free / max(per_token, 1e-9), request.context)))
        group = SimulatedGroup(len(self._groups), model.index, places, speed, request.concurrency, request.batch_tokens, limit)
        self._groups.append(group)
        model.groups.append(group)
        for place in places:
            self._on[place].append(group)
        self.memory.enter(group, placed, request, device, per_token)

    # ------------------------------------------------------------------ the loop

    def run(self, trace: Iterable[Arrival]) -> Outcome:
        """To the end of the trace, and until all that was let in has ended."""
        events, models, recorder = self._events, self._models, self._recorder
        overhead_s = self._settings.overhead_s
        for time_s, name, prompt, output in trace:
            while events and events[0][0] <= time_s:
                self._step()
            if time_s >= recorder.next_sample_s:
                self._sample(time_s)
            model = models.get(name)
            if model is None:
                recorder.unknown += 1
                continue
            request = model.request
            job = Job(time_s - overhead_s, model.index, min(prompt, request.context - 1), output)
            job.output = max(1, min(output, request.context - job.prompt))
            job.kv_tokens = job.prompt + job.output
            self._arrive(model, job, time_s)
        while events:
            self._step()
        return recorder.outcome(self._groups, self.memory.switches)

    def _step(self) -> None:
        now, _, group, version = heappop(self._events)
        if now >= self._recorder.next_sample_s:
            self._sample(now)
        if group is None:
            self._go_on(now)
        elif version < 0:
            self._switched(group, now)
        elif version == group.version:
            self._advance(group, now)

    def _at(self, time_s: float, group: SimulatedGroup | None) -> None:
        """Call `_switched` for the group, or `_go_on`, at a later time."""
        heappush(self._events, (time_s, next(self._number), group, -1))

    # ------------------------------------------------------------------ requests

    def _arrive(self, model: _Model, job: Job, now: float) -> None:
        if not model.groups:
            self._recorder.refused(job, now)
        elif model.inside < model.room and not len(model.queue):
            self._submit(model, job, now)
        else:
            refused = model.queue.push(job, float(job.kv_tokens), now)
            if refused is not None:
                self._recorder.refused(refused, now)

    def _submit(self, model: _Model, job: Job, now: float) -> None:
        model.inside += 1
        groups = model.groups
        group = groups[0]
        if len(groups) > 1:
            ready = [each for each in groups if each.state == "ready"]
            group = min(ready or groups, key=lambda each: (each.outstanding, each.index))
        if group.state != "ready":
            model.held.append(job)
            self._held.add(model)
            self._bring(model, now)
            return
        self._start(group, job, now)

    def _start(self, group: SimulatedGroup, job: Job, now: float) -> None:
        was_busy = group.busy
        group.advance(now)
        rest_s = group.rest_s()
        group.add(job)
        group.used_s = now
        group.admit()
        if not group.waiting:
            job.late_s = rest_s
        if group.busy != was_busy:
            self._share(group, now)
        self._schedule(group)

    def _advance(self, group: SimulatedGroup, now: float) -> None:
        group.advance(now)
        ended = group.settle(now)
        if ended:
            group.used_s = now
            model = self._by_index[group.model]
            model.inside -= len(ended)
            for job in ended:
                self._recorder.ended(job, now)
            group.admit()
            if not group.busy:
                self._share(group, now)
            self._schedule(group)
            while len(model.queue) and model.inside < model.room:
                job = model.queue.pop(now)
                if job is None:
                    break
                self._submit(model, job, now)
            if group.state == "parking" and not group.inside:
                self.memory.park(group, now)
        else:
            self._schedule(group)

    def _schedule(self, group: SimulatedGroup) -> None:
        group.version += 1
        time_s = group.next_s()
        if time_s != NEVER:
            heappush(self._events, (time_s, next(self._number), group, group.version))

    def _share(self, group: SimulatedGroup, now: float) -> None:
        """It became busy or idle: groups that are busy on one device have its time in turns."""
        affected = {other.index: other for place in group.places for other in self._on[place] if other.busy}
        for other in affected.values():
            share = 1.0 / max(sum(each.busy for each in self._on[place]) for place in other.places)
            if share != other.share:
                other.advance(now)
                other.share = share
                if other is not group:
                    self._schedule(other)

    # ------------------------------------------------------------------ residency

    def _switched(self, group: SimulatedGroup, now: float) -> None:
        """A park or a wake is done."""
        self.memory.done(group, now)
        model = self._by_index[group.model]
        if group.state == "ready" and model.held:
            self._release(model, now)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Wake what is asked for, as far as there is room or room can be made."""
        for model in sorted(self._held, key=lambda each: (-each.request.priority, each.request.name)):
            self._bring(model, now)

    def _bring(self, model: _Model, now: float) -> None:
        """Once, however many ask."""
        states = {group.state for group in model.groups}
        if "ready" in states:
            self._release(model, now)
        elif "waking" not in states and "parked" in states:
            parked = next(group for group in model.groups if group.state == "parked")
            others = {other.index: other for place in parked.places for other in self._on[place] if other is not parked}
            self.memory.bring(parked, others.values(), model.held[0].arrived_s, now)

    def _release(self, model: _Model, now: float) -> None:
        """Those that were held go to groups that are ready."""
        held, model.held = model.held, []
        self._held.discard(model)
        ready = [group for group in model.groups if group.state == "ready"]
        for job in held:
            self._start(min(ready, key=lambda each: (each.outstanding, each.index)), job, now)

    def _sample(self, now: float) -> None:
        self._recorder.sample(now, self.memory.resident, self.memory.kv_bytes(self._groups), self.memory.switches, self._groups)
