"""The torch engine on one GPU in figures: decode against the memory's speed, throughput, start, pooling tax, wake to first token.

    python ops/bench/engine_gpu.py [--out FILE] [--checkpoint DIR]

Needs one GPU with 120 GB free and 45 GB of host memory; the random checkpoint (13.5 GB) is written to DIR (default: in /dev/shm)
and removed. Requests go through the pool driver's own core and the rank's own compute thread, as in a pool, in this process. The
rival's figures are constants here, measured on the same card and shape on another day. The whole result goes to FILE as JSON, a
table against the targets to stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import KvSpec, LimitsSpec, ModelSpec
from ops.bench import random_7b
from ops.bench.gpu_pool import GpuPool
from ops.bench.shape_checkpoint import LLAMA_7B
from ops.bench.timing import Figures, spread, timed_ms
from workers.memory.cuda_arena import CudaArena
from workers.messages import LoadShard, NewSequence, Sampling, SequenceStep, Step, StepDone

_IMPORTED = time.time()

GIB = 2**30
WAIT_S = 60.0
BLOCK_TOKENS, BLOCKS = 16, 32 * 36
CONCURRENCY, BATCH_TOKENS = 256, 8192
RIVAL: dict[str, Any] = {
    "what": "vLLM 0.25.1, one H200, the same shape, measured 2026-11 (start without its import of 33 s)",
    "decode_tokens_per_s": 216,
    "throughput": {"8": 1350, "32": 3196, "128": 4700},
    "start_s": 187,
    "wake_ms": 488,
}


def spec_of(source: Path, floor_bytes: int, ceiling_bytes: int) -> ModelSpec:
    return ModelSpec(
        source=str(source),
        precision="bf16",
        limits=LimitsSpec(concurrency=CONCURRENCY, queue=1024, batch_tokens=BATCH_TOKENS),
        kv=KvSpec(floor=floor_bytes, ceiling=ceiling_bytes, prefix_cache=False),
    )


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 31999) for _ in range(length)] for _ in range(count)]


def bandwidth_gb_s() -> float:
    """Device copy, read plus write, by kernels."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.add(source, 1.0, out=target)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / statistics.median(times) / 1e6


def generate(pool: GpuPool, model: str, count: int, inputs: int, outputs: int, seed: int) -> Figures:
    """`count` requests at once."""
    asked = prompts(count, inputs, seed)
    steps = pool.steps
    began = time.perf_counter()
    keys = [pool.submit(model, prompt, outputs) for prompt in asked]
    pool.finish(keys)
    took = time.perf_counter() - began
    firsts = [pool.tokens[key][0] - began for key in keys]
    after = max(firsts)
    last = max(pool.tokens[key][-1] for key in keys)
    decode_steps = outputs - 1
    return {
        "requests": count,
        "seconds": round(took, 4),
        "tokens_per_s": round(count * outputs / took, 1),
        "first_token_ms": spread([first * 1e3 for first in firsts]),
        "ms_a_step_after_all_first_tokens": round((last - began - after) / max(decode_steps, 1) * 1e3, 3),
        "steps": pool.steps - steps,
    }


def best_of(pool: GpuPool, model: str, repeat: int, count: int, inputs: int, outputs: int) -> Figures:
    runs = [generate(pool, model, count, inputs, outputs, seed) for seed in range(repeat)]
    rates = [run["tokens_per_s"] for run in runs]
    return {**runs[rates.index(statistics.median_low(rates))], "all_tokens_per_s": rates}


def measure_start(checkpoint: Path, cache: Path) -> Figures:
    """A process of its own, from its start to the first token; its caches (kernels, digests, files) are warm."""
    command = [sys.executable, __file__, "--start", str(checkpoint), "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures the start failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def start(checkpoint: Path, cache: Path) -> None:
    began = psutil.Process().create_time()
    with tempfile.TemporaryDirectory() as directory:
        pool = GpuPool(100 * GIB, cache, Path(directory))
        gpu_ready = time.time()
        pool.assign({"m": spec_of(checkpoint, GIB, 40 * GIB)})
        ready = time.time()
        pool.finish([pool.submit("m", range(3, 35), 1)])
        token = time.time()
    figures = {
        "import_s": _IMPORTED - began,
        "gpu_s": gpu_ready - _IMPORTED,
        "load_and_graphs_s": ready - gpu_ready,
        "first_request_s": token - ready,
        "total_s": token - began,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}), flush=True)


class Alone:
    """One shard driven by hand."""

    def __init__(self, pool: GpuPool, checkpoint: Path) -> None:
        from workers.comm.single import SingleComm
        from workers.engines.torch.cuda.engine import GpuEngine

        engine = pool.rank.make_engine("torch")
        assert isinstance(engine, GpuEngine)
        spec = spec_of(checkpoint, GIB, 8 * GIB).model_copy(update={"limits": LimitsSpec(concurrency=32, batch_tokens=2048)})
        command = LoadShard(1, 99, "alone", spec.model_dump_json(), (0,), 1, 1, BLOCK_TOKENS, BLOCKS, 2 * BLOCKS, {})
        self.shard = engine.load(command, 0, pool.rank.arena, SingleComm(), lambda *_: None)
        self._steps = 0

    def run(self, *parts: SequenceStep) -> StepDone:
        self._steps += 1
        done = self.shard.step(Step(self._steps, 99, parts))
        assert done is not None
        return done

    def forget(self, *sequences: int) -> None:
        self.shard.begin(Step(0, 99, (), sequences))

    def prefill(self, sequence: int, tokens: list[int]) -> StepDone:
        blocks = tuple(range(-(-(len(tokens) + 1) // BLOCK_TOKENS)))
        return self.run(SequenceStep(sequence, tuple(tokens), 0, blocks, True, NewSequence(Sampling())))


def measure_wake(alone: Alone, arena: CudaArena, repeat: int, free_before_bytes: int) -> Figures:
    """A parked model's first token of a 512-token prompt: its layers computed as they arrive, and after the whole wake."""
    prompt = prompts(1, 512, 3)[0]
    shard = alone.shard
    expected = [alone.prefill(1, prompt).sampled[0].token for _ in range(3)][-1]
    alone.forget(1)
    resident, parks = [], []
    for _ in range(repeat):
        resident.append(timed_ms(lambda: alone.prefill(1, prompt)))
        alone.forget(1)
    save_ms = timed_ms(shard.save)
    times: dict[str, list[float]] = {"layer_by_layer": [], "after_the_wake": []}
    wakes: list[float] = []
    right = True
    for way in times:
        for _ in range(repeat):
            parks.append(timed_ms(shard.park))
            began = time.perf_counter()
            wake = shard.wake(BLOCKS)
            if way == "after_the_wake":
                wake.wait(WAIT_S)
                wakes.append((time.perf_counter() - began) * 1e3)
            right &= alone.prefill(1, prompt).sampled[0].token == expected
            times[way].append((time.perf_counter() - began) * 1e3)
            wake.wait(WAIT_S)
            alone.forget(1)
    shard.park()
    arena.trim()
    torch.cuda.empty_cache()
    left_bytes = free_before_bytes - arena.driver.memory_info()[0]
    shard.wake(BLOCKS).wait(WAIT_S)
    return {
        "first_token_resident_ms": spread(resident),
        "first_token_layer_by_layer_ms": spread(times["layer_by_layer"]),
        "first_token_after_the_wake_ms": spread(times["after_the_wake"]),
        "wake_ms": spread(wakes),
        "park_ms": spread(parks),
        "save_ms": round(save_ms, 1),
        "left_behind_bytes": left_bytes,
        "tokens_right": right,
    }


def profile(alone: Alone) -> Figures:
    """Where the GPU's time goes, by kernel: decode steps of 1 and 32 sequences at 560 tokens, and a prompt of 2048 tokens."""
    found: Figures = {}
    for count in (1, 32):
        numbers = tuple(range(1, count + 1))
        for number in numbers:
            blocks = tuple(range((number - 1) * 36, number * 36))
            part = SequenceStep(number, tuple(prompts(1, 560, number)[0]), 0, blocks, True, NewSequence(Sampling()))
            alone.run(part)
        state = {"at": 560}

        def decode(numbers: tuple[int, ...] = numbers, state: dict[str, int] = state) -> None:
            alone.run(*(SequenceStep(number, (), state["at"], (), True) for number in numbers))
            state["at"] += 1

        found[f"decode_{count}"] = _kernels(decode, 4)
        alone.forget(*numbers)
    long = prompts(1, 2047, 5)[0]

    def prefill() -> None:
        alone.prefill(1, long)
        alone.forget(1)

    found["prefill_2047"] = _kernels(prefill, 2)
    return found


def _kernels(work: Callable[[], None], repeat: int) -> Figures:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    work()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeat):
            work()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
    by_name: dict[str, tuple[float, int]] = {}
    for event in events:
        total, count = by_name.get(event.name, (0.0, 0))
        by_name[event.name] = total + event.device_time, count + 1
    began, ended = min(event.time_range.start for event in events), max(event.time_range.end for event in events)
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:12]
    return {
        "us_a_step": round((ended - began) / repeat, 1),
        "us_in_kernels": round(sum(total for total, _ in by_name.values()) / repeat, 1),
        "kernels": {name[:90]: {"us": round(total / repeat, 1), "launches": count / repeat} for name, (total, count) in top},
    }


def table(result: Figures) -> str:
    decode, roof = result["decode_1"], result["roof_tokens_per_s"]
    wake, tax = result["wake"], result["pooling_tax"]
    step_rate = 1e3 / decode["ms_a_step_after_all_first_tokens"]
    rows = [
        ("device memory", f"{result['bandwidth_gb_s']:.0f} GB/s read plus write", ""),
        (
            "decode, 1 stream, 32 in / 256 out",
            f"{decode['tokens_per_s']:.0f} tokens/s, {decode['tokens_per_s'] / roof:.1%} of {roof:.0f} (steps {step_rate:.0f}/s)",
            f">= 85 %; rival {RIVAL['decode_tokens_per_s']}",
        ),
    ]
    for count, rival in RIVAL["throughput"].items():
        rate = result["throughput"][count]["tokens_per_s"]
        rows.append((f"512 in / 128 out, {count} at once", f"{rate:.0f} tokens/s, {rate / rival:.2f} x", f">= 1.0 x {rival}"))
    rows += [
        (
            "start of a process, warm caches",
            f"{result['start']['total_s']:.1f} s {result['start']}",
            f"<= 30 s; rival {RIVAL['start_s']}",
        ),
        ("elastic over fixed KV, 32 at once", f"{tax['elastic_over_fixed']:.3f}", ">= 0.99"),
        (
            "wake to first token, 512 in, layer by layer",
            f"{wake['first_token_layer_by_layer_ms']['median']:.0f} ms",
            f"rival wake {RIVAL['wake_ms']}",
        ),
        (
            "  after the wake / resident",
            f"{wake['first_token_after_the_wake_ms']['median']:.0f} / {wake['first_token_resident_ms']['median']:.0f} ms",
            "",
        ),
        ("park", f"{wake['park_ms']['median']:.1f} ms", "<= 30 ms"),
        ("left behind by a parked model", f"{wake['left_behind_bytes'] / GIB:.2f} GiB", "<= 0.2 GiB"),
        ("tokens right after wakes", str(wake["tokens_right"]), "True"),
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{width}}  {figure:<60} {target}" for name, figure, target in rows)


def measure(checkpoint: Path, cache: Path, directory: Path, repeat: int) -> Figures:
    card = torch.cuda.get_device_name(0)
    result: Figures = {"card": card, "date": date.today().isoformat(), "torch": torch.__version__, "rival": RIVAL}
    result["bandwidth_gb_s"] = round(bandwidth_gb_s(), 1)
    result["roof_tokens_per_s"] = round(result["bandwidth_gb_s"] * 1e9 / LLAMA_7B.weight_bytes, 1)
    result["first_sight_of_the_checkpoint_s"] = round(timed_ms(lambda: open_checkpoint(str(checkpoint), cache)) / 1e3, 2)
    result["start"] = measure_start(checkpoint, cache)
    pool = GpuPool(122 * GIB, cache, directory)
    began = time.perf_counter()
    elastic, fixed = spec_of(checkpoint, GIB, 45 * GIB), spec_of(checkpoint, 24 * GIB, 24 * GIB)
    pool.assign({"elastic": elastic})
    result["load_beside_warm_imports_s"] = round(time.perf_counter() - began, 2)
    generate(pool, "elastic", 8, 64, 16, 99)
    result["decode_1"] = best_of(pool, "elastic", repeat, 1, 32, 256)
    result["throughput"] = {str(count): best_of(pool, "elastic", repeat, count, 512, 128) for count in (8, 32, 128)}
    print(json.dumps({name: result[name] for name in ("start", "decode_1", "throughput")}), flush=True)
    pool.assign({"elastic": elastic, "fixed": fixed})
    rates: dict[str, list[float]] = {"elastic": [], "fixed": []}
    generate(pool, "fixed", 32, 512, 32, 98)
    for seed in range(repeat):
        for name, values in rates.items():
            values.append(generate(pool, name, 32, 512, 128, seed)["tokens_per_s"])
    ratio = statistics.median(rates["elastic"]) / statistics.median(rates["fixed"])
    result["pooling_tax"] = {"elastic_over_fixed": round(ratio, 4), "tokens_per_s": rates}
    pool.assign({})
    pool.until(lambda: not pool.core.state.groups)
    arena = pool.rank.arena
    arena.trim()
    torch.cuda.empty_cache()
    free_before_bytes = arena.driver.memory_info()[0]
    alone = Alone(pool, checkpoint)
    result["wake"] = measure_wake(alone, arena, 3, free_before_bytes)
    result["profile"] = profile(alone)
    alone.shard.close()
    pool.close()
    arena.check()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: ops/bench/results/engine-CARD-DATE.json")
    parser.add_argument("--checkpoint", type=Path, default=Path("/dev/shm/modelyard-7b"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "modelyard-bench")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start is not None:
        start(options.start, options.cache)
        return
    random_7b.write(options.checkpoint, torch.device("cuda"))
    torch.cuda.empty_cache()
    try:
        with tempfile.TemporaryDirectory() as directory:
            result = measure(options.checkpoint, options.cache, Path(directory), options.repeat)
    finally:
        shutil.rmtree(options.checkpoint)
    name = f"engine-{result['card'].lower().replace(' ', '-')}-{result['date']}.json"
    out: Path = options.out or Path(__file__).parent / "results" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["profile"]))
    print(f"{result['card']}, {result['date']}\n{table(result)}")


if __name__ == "__main__":
    main()
