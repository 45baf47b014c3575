"""How long a switched route takes to be used by every gateway, and whether a request suffers.

    python -m ops.bench.flip [--flips 1000] [--gateways 3] [--clients 2]

Three real gateways over a real Valkey, two pools that speak the real protocol with one model each. While clients ask a route
through every gateway, it is switched to and fro by the admin service of each gateway in turn. Counted are requests that
failed, were misrouted (an answer that is not of the model of its route's generation, or of a generation that every gateway
had left before the request was sent) or reached pools twice. A flip's time is from just before its commit to when the last
gateway used it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import grpc

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import admin_pb2 as admin
from gateway.api.proto import inference_pb2 as inference
from gateway.api.proto.admin_pb2_grpc import AdminStub
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.records import Keys
from ops.bench.scripted_site import PacedPool, Site

RESULTS = Path(__file__).parent / "results"
MODELS = {"one": "a", "two": "b"}
TOKENS = 4


@dataclass
class Answer:
    gateway: int
    sent_unix: float
    generation: int
    model: str
    text: str


@dataclass
class Load:
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    running: bool = True

    async def client(self, number: int, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stub = InferenceStub(channel)
            while self.running:
                request_id = uuid.uuid4().hex
                self.ids.append(request_id)
                sent = time.time()
                request = inference.GenerateRequest(model="chat", prompt="hello", max_tokens=TOKENS, request_id=request_id)
                call = stub.Generate(request, timeout=30)
                try:
                    answer = await call
                    metadata = dict(await call.initial_metadata())
                except grpc.aio.AioRpcError as error:
                    self.failures.append(f"{error.code().name}: {error.details()}")
                    continue
                generation = int(str(metadata["modelyard-route-generation"]))
                self.answers.append(Answer(number, sent, generation, answer.model, answer.choices[0].text))


async def measure(flips: int, gateways: int, clients: int, step_s: float, pause_s: float) -> dict[str, Any]:
    pools = [PacedPool(f"pool-{letter}", model, letter, step_s=step_s, concurrency=64) for model, letter in MODELS.items()]
    load = Load()
    with tempfile.TemporaryDirectory(prefix="yard-flip-") as directory:
        async with Site(Path(directory), pools, gateways) as site:
            limits = {"limits": {"concurrency": 64}}
            await site.apply(*(("Model", model, {"source": "file:/none", **limits}) for model in MODELS))
            await site.apply(("Route", "chat", {"targets": [{"model": "one"}]}))
            await site.until_answered("chat", *MODELS)
            tasks = [
                asyncio.create_task(load.client(number, gateway.address))
                for number, gateway in enumerate(site.gateways)
                for _ in range(clients)
            ]
            began = time.monotonic()
            await _flip(site, flips, pause_s)
            await asyncio.sleep(0.5)
            load.running = False
            await asyncio.gather(*tasks)
            took_s = time.monotonic() - began
            commits = await _commits(site)
            used = [(await gateway.stop())["chat"] for gateway in site.gateways]
            submits = {request: sum(pool.submits[request] for pool in pools) for request in load.ids}
    return {
        "flips": flips,
        "gateways": gateways,
        "clients": clients * gateways,
        "requests": len(load.answers),
        "requests_per_s": round(len(load.answers) / took_s, 1),
        "committed_to_used_ms": _distribution(commits, used),
        "failed": len(load.failures),
        "failures": sorted(set(load.failures))[:5],
        "misrouted": _misrouted(load.answers, commits, used),
        "duplicated": sum(count > 1 for count in submits.values()),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


async def _flip(site: Site, flips: int, pause_s: float) -> None:
    channels = [grpc.aio.insecure_channel(gateway.address) for gateway in site.gateways]
    try:
        for number in range(flips):
            target = list(MODELS)[(number + 1) % 2]
            stub = AdminStub(channels[number % len(channels)])
            await stub.SwitchRoute(admin.SwitchRouteRequest(route="chat", to_model=target), timeout=30)
            await asyncio.sleep(pause_s)
    finally:
        for channel in channels:
            await channel.close()


async def _commits(site: Site) -> dict[int, tuple[float, str]]:
    """Generation -> (unix time just before its commit, model), from the audit stream."""
    commits = {}
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await site.redis.xrange(Keys("bench").audit))
    for _, entry in entries:
        if entry[b"kind"] == b"Route":
            spec = json.loads(entry[b"to"])["manifest"]["spec"]
            commits[int(entry[b"generation_to"])] = (float(entry[b"time"]), spec["targets"][0]["model"])
    return commits


def _used_from(times: list[tuple[int, float]], generation: int) -> float:
    """When a gateway used this generation, or one after it."""
    return next((unix for used, unix in times if used >= generation), float("inf"))


def _distribution(commits: dict[int, tuple[float, str]], used: list[list[tuple[int, float]]]) -> dict[str, float]:
    times = sorted(
        (max(_used_from(each, generation) for each in used) - committed) * 1000
        for generation, (committed, _) in commits.items()
        if generation > 1
    )
    return {
        "p50": round(statistics.median(times), 2),
        "p90": round(times[int(len(times) * 0.9)], 2),
        "p99": round(times[int(len(times) * 0.99)], 2),
        "max": round(times[-1], 2),
    }


def _misrouted(answers: list[Answer], commits: dict[int, tuple[float, str]], used: list[list[tuple[int, float]]]) -> int:
    wrong = 0
    newest = sorted((max(_used_from(each, generation) for each in used), generation) for generation in commits)
    for answer in answers:
        model = commits[answer.generation][1]
        left_behind = max((generation for unix, generation in newest if unix < answer.sent_unix), default=0)
        wrong += answer.model != model or answer.text != MODELS[model] * TOKENS or answer.generation < left_behind
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="per gateway")
    parser.add_argument("--step-ms", type=float, default=10.0, help="a step of the pools: one token of each request")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="between two flips")
    arguments = parser.parse_args()
    figures = asyncio.run(
        measure(arguments.flips, arguments.gateways, arguments.clients, arguments.step_ms / 1000, arguments.pause_ms / 1000)
    )
    now = datetime.now(UTC)
    figures = {"bench": "flip", "when": now.isoformat(timespec="seconds"), "cpus": os.cpu_count(), **figures}
    figures["machine"] = platform.machine()
    print(json.dumps(figures, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"flip-{now:%Y-%m-%d}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
