"""The GPU memory pool in figures: what a wake, a park and a remap take, against the link measured in the same run.

    python ops/bench/pool.py [--out FILE] [--repeat N]

One GPU with 60 GB free and 32 GB of host memory. The whole result goes to FILE as JSON, a table against the targets to stdout.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.pool_hardware import GIB, measure_link, measure_page_sizes, measure_pinning
from ops.bench.pool_models import (
    Model,
    measure_busy_interpreter,
    measure_first_token,
    measure_left_behind,
    measure_neighbours,
    measure_pooling_tax,
    measure_remap,
    measure_replay_noise,
    measure_two_wakes,
    measure_wakes,
)
from ops.bench.timing import Figures
from workers.memory.copy_engine import CopyEngine
from workers.memory.cuda_arena import PAGE_BYTES, CudaArena
from workers.memory.cuda_driver import CudaDriver
from workers.memory.lanes import lanes_of


def table(result: Figures) -> str:
    wake, link = result["wake"], result["link"]["host_to_gpu_gb_s"]["median"]
    left_first, left = (each["left_bytes"] / GIB for each in result["left_behind"])
    tax, pinning = result["pooling_tax"], result["pinning"]
    token = result["first_token"]
    neighbours = result["neighbours"]
    remap = result["remap"]["total_ms"]["median"]
    rows = [
        ("link, host to GPU", f"{link:.1f} GB/s", ""),
        ("wake 7B from pinned host", f"{wake['wake_ms']['median']:.0f} ms, {wake['share_of_link']:.1%} of the link", ">= 92 %"),
        ("first layer may run", f"{wake['first_layer_ready_ms']['median']:.1f} ms", ""),
        ("first token, 512-token prompt", f"{token['prefill_during_wake_ms']['median']:.0f} ms", ""),
        ("  with prefill after the wake", f"{token['wake_then_prefill_ms']['median']:.0f} ms", ""),
        ("park, host copy kept", f"{wake['park_ms']['median']:.1f} ms", "<= 30 ms"),
        ("left behind by a parked model", f"{left:.3f} GiB", "<= 0.2 GiB"),
        ("  by the first one, with the libraries", f"{left_first:.3f} GiB", "once a process"),
        ("KV remap, 8 GiB", f"{remap:.1f} ms", "<= 20 ms"),
        ("weights and decode graph right after wakes", str(wake["weights_and_replays_right"]), "True"),
        (
            "neighbour's step, alone / beside wake",
            f"{neighbours['step_alone_ms']['median']:.2f} / {neighbours['step_beside_wake_ms']['median']:.2f} ms"
            f" (max {neighbours['step_beside_wake_ms']['max']:.1f})",
            "",
        ),
        ("two wakes at once end at", f"{result['two_wakes']['ends_ms']} ms", ""),
        ("wake beside busy Python", f"{result['busy_interpreter']['wake_ms']:.0f} ms", ""),
        ("decode step, pool / plain memory", f"{tax['pool_ms']['median']:.3f} / {tax['plain_ms']['median']:.3f} ms", ">= 0.99"),
        ("pinning, first time / again", f"{pinning['first']['s_per_gib']} / {pinning['again']['s_per_gib']} s/GiB", "< 0.45"),
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{width}}  {figure:<40} {target}" for name, figure, target in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: ops/bench/results/pool-CARD-DATE.json")
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    repeat: int = options.repeat
    card = torch.cuda.get_device_name(0)
    result: Figures = {
        "card": card,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "cuda_bindings": importlib.metadata.version("cuda-bindings"),
        "page_bytes": PAGE_BYTES,
        "repeat": repeat,
    }
    result["link"] = measure_link(repeat)
    arena = CudaArena(0, 60 * GIB)
    driver = arena.driver
    assert isinstance(driver, CudaDriver)
    result["page_sizes_14_gb_ms"] = measure_page_sizes(driver, repeat)
    pinned, result["pinning"] = measure_pinning(driver, 26 * GIB)
    engine = CopyEngine(lanes_of(arena))
    with torch.inference_mode():
        first = Model(arena, pinned, engine, "first")
        result["save_s"] = round(first.save_s, 3)
        result["wake"] = measure_wakes(first, repeat, result["link"]["host_to_gpu_gb_s"]["median"])
        result["replay_noise"] = measure_replay_noise(first, 300)
        left_first = measure_left_behind(first, arena)
        second = Model(arena, pinned, engine, "second")
        result["left_behind"] = [left_first, measure_left_behind(second, arena)]
        result["remap"] = measure_remap(arena, repeat)
        result["first_token"] = measure_first_token(first, 5)
        result["neighbours"] = measure_neighbours(second, first, 5)
        result["two_wakes"] = measure_two_wakes(first, second)
        result["busy_interpreter"] = measure_busy_interpreter(first)
        result["pooling_tax"] = measure_pooling_tax(first)
    arena.check()
    result["ledger"] = {**asdict(arena.report()), "fragmentation": round(arena.report().fragmentation, 5)}
    engine.close()
    out: Path = options.out or Path(__file__).parent / "results" / f"pool-{card.lower().replace(' ', '-')}-{result['date']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["page_sizes_14_gb_ms"]))
    print(json.dumps(result["ledger"]))
    print(f"{card}, {result['date']}\n{table(result)}")


if __name__ == "__main__":
    main()
