"""The simulator: times by hand where they can be had, and the decisions of placement and residency under it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from sites import GIB, model, node

from gateway.cli.traces import Arrival, generate
from placement.capacity import fewest
from placement.outcome import Outcome
from placement.packing import place
from placement.simulated_group import Job
from placement.simulation import Settings, Simulation
from placement.speed import Speed
from placement.types import Device, ModelRequest, Slo, Snapshot

SPEED = Speed(base_s=0.01, sequence_s=0.001, prompt_token_s=0.0001)


class FirstCome:
    """A queue of so many requests."""

    def __init__(self, limit: int = 100) -> None:
        self._jobs: deque[Job] = deque()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, job: Job, cost: float, now_s: float) -> Job | None:
        self._jobs.append(job)
        return self._jobs.pop() if len(self._jobs) > self._limit else None

    def pop(self, now_s: float) -> Job | None:
        return self._jobs.popleft() if self._jobs else None


def run(
    devices: tuple[Device, ...], models: tuple[ModelRequest, ...], *trace: Arrival, queue: int = 100, **fields: object
) -> Outcome:
    snapshot = Snapshot(devices, models)
    speeds = {request.name: SPEED for request in models}
    settings = Settings(**{"speeds": speeds, "overhead_s": 0.0, **fields})  # type: ignore[arg-type]
    return Simulation(snapshot, place(snapshot), lambda request: FirstCome(queue), settings).run(trace)


def served(name: str = "m", **request: object) -> ModelRequest:
    return model(name, 4, **{"concurrency": 4, "context": 1000, "batch_tokens": 512, **request})


ONE = node("p", "n", 1, 24)


def test_one_request_takes_what_its_tokens_take() -> None:
    outcome = run(ONE, (served(),), Arrival(1.0, "m", 100, 11))
    (row,) = outcome.models
    step_s = SPEED.base_s + 100 * SPEED.prompt_token_s
    assert row.first_token_p50_s == pytest.approx(step_s)
    assert outcome.seconds == pytest.approx(1.0 + step_s + 10 * SPEED.token_s(1))
    assert row.output_tokens == 11


def test_a_prompt_waits_for_half_of_the_step_that_runs() -> None:
    long, short = Arrival(0.0, "m", 1, 900), Arrival(1.0, "m", 100, 1)
    (row,) = run(ONE, (served(),), long, short).models
    step_s = SPEED.base_s + 100 * SPEED.prompt_token_s + SPEED.sequence_s
    assert row.first_token_p99_s == pytest.approx(SPEED.token_s(1) / 2 + step_s)


def test_a_prompt_waits_for_single_steps_of_models_on_the_same_device() -> None:
    """Half of one that runs, and one more: not for half of the time until its own step is done."""
    trace = Arrival(0.0, "a", 1, 900), Arrival(1.0, "b", 100, 1)
    rows = run(ONE, (served("a"), served("b")), *trace).models
    prompt = next(row for row in rows if row.model == "b")
    step_s = SPEED.base_s + 100 * SPEED.prompt_token_s
    assert prompt.first_token_p50_s == pytest.approx(1.5 * SPEED.token_s(1) + step_s)
    assert 1.5 * SPEED.token_s(1) < step_s


def test_sequences_of_a_batch_share_the_fixed_part_of_a_step() -> None:
    four = run(ONE, (served(),), *(Arrival(0.0, "m", 1, 101) for _ in range(4)))
    assert four.seconds == pytest.approx(100 * SPEED.token_s(4), rel=0.03)


def test_who_finds_no_room_waits_and_who_finds_no_queue_is_refused() -> None:
    trace = [Arrival(0.0, "m", 1, 100) for _ in range(20)]
    outcome = run(ONE, (served(),), *trace, queue=4)
    (row,) = outcome.models
    assert row.refused == 20 - 2 * 4 - 4  # what runs, as many again inside, and the queue
    assert row.requests == 20
    assert row.within_slo <= 12 / 20


def test_models_on_one_device_have_its_time_in_turns() -> None:
    alone = run(ONE, (served("a"),), Arrival(0.0, "a", 1, 200))
    both = run(ONE, (served("a"), served("b")), Arrival(0.0, "a", 1, 200), Arrival(0.0, "b", 1, 200))
    assert both.seconds == pytest.approx(2 * alone.seconds, rel=0.01)
    apart = run(node("p", "n", 2, 6), (served("a"), served("b")), Arrival(0.0, "a", 1, 200), Arrival(0.0, "b", 1, 200))
    assert apart.seconds == pytest.approx(alone.seconds, rel=0.01)


def test_replicas_share_the_load() -> None:
    trace = [Arrival(0.0, "m", 1, 100) for _ in range(8)]
    one = run(node("p", "n", 2, 6), (served(),), *trace)
    two = run(node("p", "n", 2, 6), (served(replicas=2),), *trace)
    assert two.seconds < 0.6 * one.seconds


def test_a_model_that_takes_turns_is_woken_once_for_all_who_ask() -> None:
    """Two models of 4 GiB on a device for one: each request for the one that is out parks the other."""
    devices = node("p", "n", 1, 6, standby_bytes=50 * GIB)
    trace = [Arrival(10.0 * turn + 0.1 * ask, name, 1, 5) for turn, name in enumerate("abab") for ask in range(3)]
    outcome = run(devices, (served("a"), served("b")), *trace)
    assert 3 <= outcome.switches <= 4
    assert all(row.requests == 6 and not row.refused for row in outcome.models)
    assert max(row.first_token_p99_s for row in outcome.models) > 0.1  # the wake


def test_busy_models_take_turns_after_a_while_and_nothing_is_lost() -> None:
    devices = node("p", "n", 1, 6, standby_bytes=50 * GIB)
    trace = [Arrival(0.05 * step, name, 1, 20) for step in range(200) for name in "ab"]
    outcome = run(devices, (served("a"), served("b")), *sorted(trace), queue=1000)
    assert outcome.switches >= 2
    assert sum(row.requests for row in outcome.models) == 400
    assert not sum(row.refused for row in outcome.models)


def test_pinned_models_stay_in_memory() -> None:
    devices = node("p", "n", 1, 11, standby_bytes=50 * GIB)
    models = (served("pinned", pinned=True), served("a"), served("b"))
    trace = [Arrival(5.0 * turn, name, 1, 5) for turn, name in enumerate(("a", "b", "a", "b", "pinned"))]
    outcome = run(devices, models, *trace)
    pinned = next(row for row in outcome.models if row.model == "pinned")
    assert pinned.first_token_p99_s < 0.05
    assert outcome.switches


def test_the_same_trace_gives_the_same_outcome() -> None:
    trace = generate(["a", "b"], 60, 10, seed=4, prompt_tokens=50, output_tokens=20)
    assert run(ONE, (served("a"), served("b")), *trace) == run(ONE, (served("a"), served("b")), *trace)


def test_memory_switches_and_slo_over_time_add_up() -> None:
    trace = generate(["a", "b"], 60, 5, seed=4, prompt_tokens=50, output_tokens=20)
    outcome = run(node("p", "n", 1, 6, standby_bytes=50 * GIB), (served("a"), served("b")), *trace)
    assert sum(sample.switches for sample in outcome.samples) <= outcome.switches
    assert all(0 <= sample.resident_bytes <= 6 * GIB for sample in outcome.samples)
    assert outcome.requests == len(trace)


def test_how_many_devices_a_load_needs() -> None:
    snapshot = Snapshot(ONE, (served(concurrency=8),))
    speeds = {"m": SPEED}
    settings = Settings(slo=Slo(first_token_s=0.5, token_s=0.03), speeds=speeds, overhead_s=0.0)
    light, heavy = (generate(["m"], 60, rate, seed=1, prompt_tokens=20, output_tokens=50) for rate in (2, 30))
    few = fewest(snapshot, light, 0.99, lambda request: FirstCome(), settings)
    many = fewest(snapshot, heavy, 0.99, lambda request: FirstCome(), settings)
    assert few[-1].devices == 1
    assert many[-1].devices > 2
    assert many[-1].reaches(0.99)
    fewer = [each for each in many if each.devices < many[-1].devices]
    assert fewer
    assert not any(each.reaches(0.99) for each in fewer)
    impossible = replace(settings, slo=Slo(token_s=0.001))
    assert not fewest(snapshot, light, 0.99, lambda request: FirstCome(), impossible, most=8)[-1].reaches(0.99)
