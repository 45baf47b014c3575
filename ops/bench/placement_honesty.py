"""The simulator held against the default site under load: the same arrivals, simulated and run for real.

The site is started by `yard up` in a home of its own. The seeded trace is sent in parts. Before the first, between them and
after the last the speed of each model is measured through the gateway (one stream, eight streams, a long prompt), since other
work on the machine changes it from minute to minute: each part is simulated with the mean of what was measured around it. What
the requests of all parts got is compared with what the simulator says, for several SLOs from tight to loose. The load average
stands beside each measurement.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import grpc

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.cli.simulated_site import queue_of, read_site
from gateway.cli.traces import Arrival, generate
from gateway.site import state
from gateway.site.home import HOME_VARIABLE, Home
from ops.bench.timing import Figures
from placement.outcome import Outcome
from placement.packing import place
from placement.simulation import Settings, Simulation
from placement.speed import Speed
from placement.types import Plan, Slo, Snapshot

ROOT = Path(__file__).parents[2]
AGREE = 0.10
SEED = 7
SLO_FACTORS = (0.5, 1.0, 2.0)  # of the one that counts
LONG, SHORT, STREAMS, TOKENS = 112, 16, 8, 24
PROMPT, OUTPUT = 32, 24  # mean tokens of the trace
BUSY = 0.5  # of the devices' time that the trace is to take
PARTS = 3  # of the trace


@dataclass(frozen=True)
class Answer:
    model: str
    first_s: float
    token_s: float
    failed: str = ""

    def within(self, slo: Slo) -> bool:
        assert slo.first_token_s is not None
        assert slo.token_s is not None
        return not self.failed and self.first_s <= slo.first_token_s and self.token_s <= slo.token_s


def honesty(seconds: float) -> Figures:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also then the site is taken down
    with tempfile.TemporaryDirectory(prefix="yard-honesty-", dir="/tmp") as folder:
        home = Home(Path(folder))
        try:
            _yard(home, "up", "--grpc-port", "0", "--http-port", "0", "--dashboard-port", "0")
            found = state.load(home)
            if found is None:
                raise RuntimeError("the site is not up")
            site = read_site([ROOT / "configs" / "local"], home.cache_dir, "")
            return asyncio.run(_compare(found.grpc_address, site, seconds))
        finally:
            _yard(home, "down")


def _yard(home: Home, *arguments: str) -> None:
    environment = {**os.environ, HOME_VARIABLE: str(home.path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"yard {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(frozen=True)
class Calibration:
    """How fast the site was at one moment."""

    speeds: dict[str, Speed]
    overhead_s: float  # what a request takes beside computing
    load: float  # the machine's load average of the last minute


@dataclass(frozen=True)
class Part:
    trace: list[Arrival]
    answers: list[Answer]
    speeds: dict[str, Speed]
    overhead_s: float


async def _compare(address: str, site: Snapshot, seconds: float) -> Figures:
    plan = place(site)
    models = sorted({group.model for group in plan.groups})
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        parts, calibrations = await _run(InferenceStub(channel), models, seconds)
    answers = [answer for part in parts for answer in part.answers]
    slowest_s = mean(max(speed.token_s(STREAMS) for speed in part.speeds.values()) for part in parts)
    rows: list[Figures] = []
    for factor in SLO_FACTORS:
        slo = Slo(first_token_s=factor * 10 * slowest_s, token_s=factor * 2 * slowest_s)
        outcomes = [_simulated(site, plan, part, slo) for part in parts]
        simulated = sum(outcome.within_slo * len(part.trace) for outcome, part in zip(outcomes, parts, strict=True)) / len(
            answers
        )
        real = mean(answer.within(slo) for answer in answers)
        print(f"  slo {slo.first_token_s:.2f} s, {slo.token_s:.3f} s a token: simulated {simulated:.1%}, real {real:.1%}")
        rows.append(
            {
                "first_token_s": round(slo.first_token_s or 0, 3),
                "token_s": round(slo.token_s or 0, 4),
                "simulated": round(simulated, 4),
                "real": round(real, 4),
                "parts": [_row(outcome, part, slo) for outcome, part in zip(outcomes, parts, strict=True)],
            }
        )
    counted = rows[SLO_FACTORS.index(1.0)]
    apart = abs(counted["simulated"] - counted["real"])
    failed = [answer.failed for answer in answers if answer.failed]
    print(f"requests within SLO: {apart * 100:.1f} points apart (target ≤ {AGREE * 100:.0f}); {len(failed)} failed")
    return {
        "good": apart <= AGREE,
        "seconds": seconds,
        "requests": len(answers),
        "failed": len(failed),
        "points_apart": round(apart * 100, 1),
        "calibrations": [_plain(calibration) for calibration in calibrations],
        "slos": rows,
    }


async def _run(stub: InferenceStub, models: list[str], seconds: float) -> tuple[list[Part], list[Calibration]]:
    for name in models:
        for tokens in (SHORT, LONG):  # the first of each size finds nothing warm
            await _ask(stub, name, tokens, 2)
    calibrations = [await _calibrate(stub, models)]
    trace = _trace(calibrations[0].speeds, seconds)
    print(f"  {len(trace)} requests in {seconds:.0f} s", flush=True)
    parts: list[Part] = []
    for index in range(PARTS):
        begins, ends = seconds / PARTS * index, seconds / PARTS * (index + 1)
        now = [arrival._replace(time_s=arrival.time_s - begins) for arrival in trace if begins <= arrival.time_s < ends]
        answers = await _send(stub, now)
        calibrations.append(await _calibrate(stub, models))
        before, after = calibrations[-2:]
        speeds = {name: _mean(before.speeds[name], after.speeds[name]) for name in models}
        parts.append(Part(now, answers, speeds, (before.overhead_s + after.overhead_s) / 2))
    return parts, calibrations


async def _calibrate(stub: InferenceStub, models: list[str]) -> Calibration:
    load = os.getloadavg()[0]
    found = {name: await _speed(stub, name) for name in models}
    speeds = {name: speed for name, (speed, _) in found.items()}
    print(f"  load average {load:.1f}: {_shown(speeds)}", flush=True)
    return Calibration(speeds, mean(overhead_s for _, overhead_s in found.values()), load)


def _simulated(site: Snapshot, plan: Plan, part: Part, slo: Slo) -> Outcome:
    return Simulation(site, plan, queue_of, Settings(slo=slo, overhead_s=part.overhead_s, speeds=part.speeds)).run(part.trace)


def _row(outcome: Outcome, part: Part, slo: Slo) -> Figures:
    return {
        "requests": len(part.trace),
        "simulated": round(outcome.within_slo, 4),
        "real": round(mean(answer.within(slo) for answer in part.answers), 4),
        "first_token_p50_s": {
            "simulated": {row.model: round(row.first_token_p50_s, 3) for row in outcome.models},
            "real": {name: round(median(_of(part.answers, name, "first_s")), 3) for name in part.speeds},
        },
        "token_p50_s": {
            "simulated": {row.model: round(row.token_p50_s, 4) for row in outcome.models},
            "real": {name: round(median(_of(part.answers, name, "token_s")), 4) for name in part.speeds},
        },
    }


def _plain(calibration: Calibration) -> Figures:
    return {
        "load_average": round(calibration.load, 2),
        "overhead_s": round(calibration.overhead_s, 4),
        "speeds": {
            name: {
                "base_s": round(speed.base_s, 5),
                "sequence_s": round(speed.sequence_s, 5),
                "prompt_token_s": round(speed.prompt_token_s, 6),
            }
            for name, speed in calibration.speeds.items()
        },
    }


def _trace(speeds: dict[str, Speed], seconds: float) -> list[Arrival]:
    """So many requests a second that the devices are about half busy, by what was just measured."""
    names = sorted(speeds)
    work_s = mean(PROMPT * speeds[name].prompt_token_s + OUTPUT * speeds[name].token_s(4) / 4 for name in names)
    return generate(names, seconds, BUSY / work_s, seed=SEED, zipf=0.7, variation=1.5, prompt_tokens=PROMPT, output_tokens=OUTPUT)


async def _send(stub: InferenceStub, trace: Sequence[Arrival]) -> list[Answer]:
    began = time.monotonic()

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(max(0.0, began + arrival.time_s - time.monotonic()))
        return await _ask(stub, arrival.model, arrival.prompt_tokens, arrival.output_tokens)

    return list(await asyncio.gather(*(one(arrival) for arrival in trace)))


async def _ask(stub: InferenceStub, model: str, prompt: int, output: int) -> Answer:
    request = pb.GenerateRequest(
        model=model,
        prompt_ids=pb.TokenIds(ids=[1000 + (prompt * 7919 + at * 104729 + time.monotonic_ns()) % 40000 for at in range(prompt)]),
        max_tokens=output,
        ignore_eos=True,
        return_token_ids=True,
        sampling=pb.Sampling(temperature=0.0),
    )
    began, first, last = time.monotonic(), 0.0, 0.0
    try:
        async for chunk in stub.GenerateStream(request):
            if any(choice.token_ids for choice in chunk.choices):
                last = time.monotonic()
                first = first or last
    except grpc.aio.AioRpcError as error:
        return Answer(model, 0.0, 0.0, f"{error.code().name}: {error.details()}")
    return Answer(model, first - began, (last - first) / (output - 1) if output > 1 else 0.0)


async def _speed(stub: InferenceStub, model: str) -> tuple[Speed, float]:
    """(its speed, what a request takes beside computing)."""
    one = [await _ask(stub, model, SHORT, TOKENS) for _ in range(2)]
    many = await asyncio.gather(*(_ask(stub, model, SHORT, TOKENS) for _ in range(STREAMS)))
    long = [await _ask(stub, model, LONG, 2) for _ in range(3)]
    short = [await _ask(stub, model, SHORT, 2) for _ in range(3)]
    token_s = mean(answer.token_s for answer in one)
    # A line through one stream and eight. Of a pipeline too: on so few cores its stages hardly work side by side.
    sequence_s = max((mean(answer.token_s for answer in many) - token_s) / (STREAMS - 1), 0.0)
    short_s = median(answer.first_s for answer in short)
    prompt_token_s = max((median(answer.first_s for answer in long) - short_s) / (LONG - SHORT), 1e-6)
    speed = Speed(max(token_s - sequence_s, 1e-6), sequence_s, prompt_token_s)
    return speed, max(short_s - SHORT * prompt_token_s - 1.5 * speed.base_s, 0.0)


def _mean(one: Speed, other: Speed) -> Speed:
    return Speed(
        (one.base_s + other.base_s) / 2,
        (one.sequence_s + other.sequence_s) / 2,
        (one.prompt_token_s + other.prompt_token_s) / 2,
    )


def _of(answers: Sequence[Answer], model: str, what: str) -> list[float]:
    return [getattr(answer, what) for answer in answers if answer.model == model and not answer.failed] or [0.0]


def _shown(speeds: dict[str, Speed]) -> str:
    return ", ".join(
        f"{name}: {speed.base_s * 1e3:.1f} + {speed.sequence_s * 1e3:.1f} ms a sequence, {speed.prompt_token_s * 1e3:.2f} ms a "
        f"prompt token"
        for name, speed in speeds.items()
    )
