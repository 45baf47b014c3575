"""What a gateway adds to asking an engine directly, beside what LiteLLM's proxy and Ray Serve's gRPC proxy add.

    python -m ops.bench.gateway [--ways gateway gateway-http litellm serve] [--litellm-python VENV/bin/python]

One scripted engine in a process of its own, over real sockets (scripted_engine.py). The gateway is a replica of Ray Serve, as
`yard up` deploys it, over a real Valkey. The load generator is this process. For each way to the engine:

1. Whole answers of 16 tokens: as many as there can be; then half of that at random times, in turns directly and through the way.
   Added is the difference of the percentiles. LiteLLM and `gateway-http` are compared with the engine's OpenAI face, the
   others with its gRPC face.
2. 64 streams of a token a step: as many tokens as can be carried; then half of that, in turns, as above; a token's time
   is from when the engine gave it out until it was read.

CPU is that of all processes of the way, for each answer or token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ops.bench.asking import (
    OFFERED_PER_S,
    STREAMS,
    GrpcTarget,
    HttpTarget,
    Measured,
    Target,
    streams,
    whole_closed,
    whole_open,
)
from ops.bench.proxies import Way, gateway_on_ray, litellm
from ops.bench.scripted_engine import EngineProcess
from ops.bench.scripted_site import Site

RESULTS = Path(__file__).parent / "results"
WAYS = ("gateway", "gateway-http", "litellm", "serve")
WARM_UP_S = 1.0
SATURATED_S = 2.5


async def measure(names: list[str], litellm_python: str, seconds: float, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that no process is left behind
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yard-gateway-")))
        site = await stack.enter_async_context(Site(directory, [], 0))
        engine = await EngineProcess.start(site.redis_url)
        stack.push_async_callback(engine.stop)
        ways: dict[str, Way] = {}
        if "litellm" in names:
            ways["litellm"] = await stack.enter_async_context(litellm(litellm_python, engine, directory))
        if set(names) - {"litellm"}:
            ways |= await stack.enter_async_context(gateway_on_ray(site, engine, directory))
        for name in names:
            figures[name] = await _way(ways[name], engine, seconds, rounds)
            print(f"{name}: {json.dumps(figures[name])}", flush=True)
    return figures


def _target(grpc_address: str, url: str) -> Target:
    return HttpTarget(url) if url else GrpcTarget(grpc_address)


async def _way(way: Way, engine: EngineProcess, seconds: float, rounds: int) -> dict[str, Any]:
    direct = _target(engine.address, engine.url if way.url else "")
    through = _target(way.address, way.url)
    processes = way.processes()
    try:
        await whole_closed(direct, WARM_UP_S)
        await whole_closed(through, WARM_UP_S)
        most = (await whole_closed(through, SATURATED_S)).per_s
        rate = most / 2

        async def ask(target: Target, turn: int, counted: list[psutil.Process]) -> Measured:
            return await whole_open(target, rate, seconds, counted, turn)

        whole = await _in_turns(ask, direct, through, processes, rounds)
        saturated = await streams(through, engine, STREAMS / OFFERED_PER_S, SATURATED_S, processes)
        carried = saturated.messages / saturated.took_s
        step_s = STREAMS / (carried / 2)

        async def stream(target: Target, turn: int, counted: list[psutil.Process]) -> Measured:
            return await streams(target, engine, step_s, seconds, counted)

        token = await _in_turns(stream, direct, through, processes, rounds)
    finally:
        await direct.close()
        await through.close()
    return {
        "whole": {"most_per_s": round(most, 1), "asked_per_s": round(rate, 1), **whole},
        "streams": {"most_per_s": round(carried, 1), "tokens_per_s": round(STREAMS / step_s, 1), **token},
    }


async def _in_turns(
    ask: Callable[[Target, int, list[psutil.Process]], Awaitable[Measured]],
    direct: Target,
    through: Target,
    processes: list[psutil.Process],
    rounds: int,
) -> dict[str, Any]:
    sums = {"direct": Measured(), "through": Measured()}
    for turn in range(rounds):
        sums["direct"].add(await ask(direct, turn, []))
        sums["through"].add(await ask(through, turn, processes))
    figures: dict[str, Any] = {}
    for share in (0.5, 0.99):
        name = f"p{share * 100:g}"
        took = {key: each.percentile_ms(share) for key, each in sums.items()}
        figures |= {f"{name}_{key}_ms": round(value, 3) for key, value in took.items()}
        figures[f"{name}_added_ms"] = round(took["through"] - took["direct"], 3)
    return {**figures, "cpu_us": round(sums["through"].cpu_us, 1)}


def table(ways: dict[str, Any]) -> str:
    lines = [
        "| | added p50, p99 of a whole answer | at | added p50, p99 of a streamed token | at | CPU a token |",
        "|---|---|---|---|---|---|",
    ]
    for name, way in ways.items():
        whole, token = way["whole"], way["streams"]
        lines.append(
            f"| {name} | {whole['p50_added_ms']:.2f} ms, {whole['p99_added_ms']:.2f} ms | {whole['asked_per_s']:.0f}/s "
            f"| {token['p50_added_ms']:.2f} ms, {token['p99_added_ms']:.2f} ms | {token['tokens_per_s']:.0f}/s "
            f"| {token['cpu_us']:.0f} µs |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--litellm-python", default="", help="of an environment with litellm[proxy]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    names = list(arguments.ways)
    if "litellm" in names and not Path(arguments.litellm_python).is_file():
        print(f"litellm: left out, there is no {arguments.litellm_python or '--litellm-python'}")
        names.remove("litellm")
    ways = asyncio.run(measure(names, arguments.litellm_python, arguments.seconds, arguments.rounds))
    write(ways, load_average)
    print(table(ways))


def write(ways: dict[str, Any], load_average: float) -> None:
    now = datetime.now(UTC)
    result = {
        "bench": "gateway",
        "when": now.isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average_1m_before": round(load_average, 2),
        "load_average_1m_after": round(os.getloadavg()[0], 2),
        "ways": ways,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"gateway-{now:%Y-%m-%d}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    main()
