"""How many requests the simulator replays in a minute of one core."""

from __future__ import annotations

import time

from gateway.cli.simulated_site import queue_of
from gateway.cli.traces import generate
from ops.bench.placement_instances import plain_model
from ops.bench.timing import Figures
from placement.packing import place
from placement.simulation import Simulation
from placement.types import Device, Snapshot

SIMULATED_A_MINUTE = 1_000_000


def simulator(arguments: object) -> Figures:
    """8 cards, the usual sizes: models that all fit, then five times as many that take turns. The gateway's own queue."""
    rows: list[Figures] = []
    for models in (12, 60):
        devices = tuple(
            Device("p", rank, "n", "cuda", 141 * 2**30, type="NVIDIA H200", standby_bytes=200 * 2**30) for rank in range(8)
        )
        names = tuple(f"m{index}" for index in range(models))
        site = Snapshot(
            devices, tuple(plain_model(name, (7, 13, 30, 3, 60)[at % 5], concurrency=32) for at, name in enumerate(names))
        )
        plan = place(site)
        trace = generate(names, 4000 if models == 12 else 2000, 50, variation=2.0, prompt_tokens=400, output_tokens=100)
        started = time.process_time()
        outcome = Simulation(site, plan, queue_of).run(trace)
        spent_s = time.process_time() - started
        rate = len(trace) / spent_s * 60
        print(
            f"{len(trace)} requests, {models} models ({sum(group.standby for group in plan.groups)} take turns): "
            f"{spent_s:.2f} s, {rate / 1e6:.2f} M a minute (target ≥ {SIMULATED_A_MINUTE / 1e6:.0f}), {outcome.switches} wakes"
        )
        rows.append(
            {
                "models": models,
                "requests": len(trace),
                "cpu_s": round(spent_s, 3),
                "requests_a_minute": round(rate),
                "wakes": outcome.switches,
            }
        )
    return {"good": all(row["requests_a_minute"] >= SIMULATED_A_MINUTE for row in rows), "runs": rows}
