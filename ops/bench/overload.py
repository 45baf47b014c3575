"""Goodput of a gateway when more is asked than its pool can compute.

    python -m ops.bench.overload [--seconds 10] [--gateways 1]

Requests come at random (Poisson) at a multiple of the pool's capacity, each with a deadline. Good is an answer that came whole
within its deadline. Overload must not lower the number of good answers: what cannot be served in time is refused at once, with
RESOURCE_EXHAUSTED and a time to try again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import inference_pb2 as inference
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from ops.bench.scripted_site import PacedPool, Site

RESULTS = Path(__file__).parent / "results"
CONCURRENCY, STEP_S, TOKENS = 8, 0.02, 10
CAPACITY_PER_S = CONCURRENCY / (STEP_S * TOKENS)
DEADLINE_S = 1.5
WARM_UP_S = 2.0


async def measure(loads: list[float], seconds: float, gateways: int) -> list[dict[str, Any]]:
    pool = PacedPool("pool-a", "m", "a", step_s=STEP_S, concurrency=CONCURRENCY)
    figures = []
    with tempfile.TemporaryDirectory(prefix="yard-overload-") as directory:
        async with Site(Path(directory), [pool], gateways) as site:
            await site.apply(("Model", "m", {"source": "file:/none", "limits": {"concurrency": CONCURRENCY, "queue": 256}}))
            channels = [grpc.aio.insecure_channel(gateway.address, options=CLIENT_OPTIONS) for gateway in site.gateways]
            try:
                stubs = [InferenceStub(channel) for channel in channels]
                await site.until_answered("m")
                for load in loads:
                    figures.append(await _offer(stubs, load, seconds))
                    await asyncio.sleep(2 * DEADLINE_S)
            finally:
                for channel in channels:
                    await channel.close()
    return figures


def _request() -> inference.GenerateRequest:
    return inference.GenerateRequest(model="m", prompt="hello", max_tokens=TOKENS)


async def _offer(stubs: list[InferenceStub], load: float, seconds: float) -> dict[str, Any]:
    """Open loop: requests come whatever becomes of those before. What ends in the first WARM_UP_S does not count."""
    rng = random.Random(int(load * 100))
    loop = asyncio.get_running_loop()
    outcomes: Counter[str] = Counter()
    waits_s: list[float] = []

    async def ask(stub: InferenceStub) -> None:
        began = loop.time()
        try:
            await stub.Generate(_request(), timeout=DEADLINE_S)
            outcome = "good"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name.lower()
        if begin + WARM_UP_S < loop.time() <= begin + WARM_UP_S + seconds:
            outcomes[outcome] += 1
            if outcome == "good":
                waits_s.append(loop.time() - began)

    tasks: set[asyncio.Task[None]] = set()
    begin = due = loop.time()
    while due < begin + WARM_UP_S + seconds:
        due += rng.expovariate(load * CAPACITY_PER_S)
        await asyncio.sleep(max(0.0, due - loop.time()))
        task = asyncio.create_task(ask(rng.choice(stubs)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    waits_s.sort()
    return {
        "load": load,
        "offered_per_s": round(load * CAPACITY_PER_S, 1),
        "good_per_s": round(outcomes["good"] / seconds, 1),
        "outcomes": dict(outcomes),
        "latency_p50_s": round(waits_s[len(waits_s) // 2], 3) if waits_s else None,
        "latency_p99_s": round(waits_s[int(len(waits_s) * 0.99)], 3) if waits_s else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9, 1.0, 2.0, 3.0])
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.loads, arguments.seconds, arguments.gateways))
    peak = max(figure["good_per_s"] for figure in figures)
    for figure in figures:
        figure["of_peak"] = round(figure["good_per_s"] / peak, 3)
    now = datetime.now(UTC)
    result = {
        "bench": "overload",
        "when": now.isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "gateways": arguments.gateways,
        "capacity_per_s": CAPACITY_PER_S,
        "deadline_s": DEADLINE_S,
        "loads": figures,
    }
    print(json.dumps(result, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"overload-{now:%Y-%m-%d}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
