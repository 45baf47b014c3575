"""A pool of two GPUs in figures: real driver, real rank processes, random weights. Tensor parallel against one GPU, groups that
share GPUs under load, wakes over two links and from a peer, parks, wakes and KV remaps through the driver, bursts on many models.

    python ops/bench/pool_gpu.py --out DIR [--seconds N]
    python ops/bench/pool_gpu.py --out DIR --device cpu        a rehearsal with tiny shapes, gloo and host memory

Two GPUs with 64 GiB free each and 16 GiB of host memory. DIR/pool-gpu.json is written anew after every part, so that what was
measured is kept whatever happens next; a part that finds too little time left is skipped and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec
from gateway.cli.traces import generate
from ops.bench import shape_checkpoint as shapes
from ops.bench.timing import Figures, spread
from ops.bench.watched_pool import RANK_MODULE, WatchedPool, figures_of, prompts
from workers.driver.sizing import Placement

GIB = 2**30
ONE, OTHER, BOTH = Placement((0,), 1, 1), Placement((1,), 1, 1), Placement((0, 1), 2, 1)


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.real = options.device == "cuda"
        self.out: Path = options.out
        self.directory = directory
        self.cache = directory / "cache"
        self.deadline = time.monotonic() + options.seconds
        self.result: Figures = {"date": date.today().isoformat(), "device": options.device, "parts": {}}
        self.vocabulary = shapes.VOCABULARY if self.real else 512
        self.scale = 1 if self.real else 8  # a rehearsal asks for less
        self._pools = 0
        for name, shape in (("7b", shapes.LLAMA_7B), ("13b", shapes.LLAMA_13B)):
            shape = shape if self.real else shapes.TINY
            size = shapes.write(directory / name, self.cache, replace(shape, vocabulary=self.vocabulary))
            self.result[f"bytes_{name}"] = size

    # ---------------------------------------------------------------- parts

    async def part(self, name: str, needs_s: float, limit_s: float, work: Callable[[], Awaitable[Any]]) -> bool:
        """Run one part within its limit and keep what it found. False when there is nothing."""
        left = self.deadline - time.monotonic()
        parts = self.result["parts"]
        began = time.monotonic()
        try:
            if left < needs_s:
                parts[name] = {"skipped": f"{left:.0f} s left"}
                return False
            async with asyncio.timeout(min(limit_s, left)):
                parts[name] = await work()
            return True
        except Exception as error:  # noqa: BLE001 - the other parts go on
            parts[name] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
            return False
        finally:
            parts.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
            self.save()
            print(name, json.dumps(parts.get(name)), flush=True)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "pool-gpu.json").write_text(json.dumps(self.result, indent=1) + "\n")

    def keep_log(self, pool: WatchedPool) -> None:
        with contextlib.suppress(OSError):
            (self.out / f"{pool.directory.name}.log").write_text((pool.directory / "ranks.log").read_text(errors="replace"))

    def new_pool(self, devices: int, memory: int | None) -> WatchedPool:
        self._pools += 1
        directory = self.directory / f"pool-{self._pools}"
        return WatchedPool(directory, self.cache, devices, memory if self.real else 4 * GIB, RANK_MODULE)

    def spec(self, shape: str, concurrency: int, ceiling_gib: float, floor_gib: float = 1.0) -> ModelSpec:
        floor, ceiling = (int(each * GIB) for each in ((floor_gib, ceiling_gib) if self.real else (0.03, ceiling_gib / 64)))
        return ModelSpec(
            source=str(self.directory / shape),
            precision="bf16",
            limits=LimitsSpec(concurrency=concurrency, queue=1024, batch_tokens=8192),
            kv=KvSpec(floor=min(floor, ceiling), ceiling=ceiling, prefix_cache=False),
        )


async def single_stream(bench: Bench, pool: WatchedPool, model: str, repeat: int) -> Figures:
    """32 tokens in, 256 out, one request at a time."""
    runs = []
    for number in range(repeat + 1):
        prompt = prompts(1, 32, 7, bench.vocabulary)[0]
        runs.append(await pool.answers([pool.ask(model, prompt, 256 // bench.scale if number else 16)]))
    best = [figures_of(run) for run in runs[1:]]
    return {
        "tokens_per_s": spread([run["tokens_per_s"] for run in best]),
        "ms_a_token": spread([run["ms_a_token"]["median"] for run in best]),
        "first_token_ms": spread([run["first_token_ms"]["median"] for run in best]),
        "tokens": runs[-1][0].tokens[:32],
    }


async def one_gpu(bench: Bench, pool: WatchedPool) -> Figures:
    return {name: await single_stream(bench, pool, name, 3) for name in ("a", "13b-one")}


async def tensor_parallel(bench: Bench, pool: WatchedPool) -> Figures:
    one, two = bench.result["parts"]["one_gpu"]["13b-one"], await single_stream(bench, pool, "13b-two", 3)
    found: Figures = {"13b-two": two}
    found["speedup"] = round(two["tokens_per_s"]["median"] / one["tokens_per_s"]["median"], 3)
    found["speedup_of_steps"] = round(one["ms_a_token"]["median"] / two["ms_a_token"]["median"], 3)
    found["equal_first_tokens"] = sum(mine == theirs for mine, theirs in zip(one["tokens"], two["tokens"], strict=True))
    found["ledger"] = pool.ledger()
    return found


async def shared_load(bench: Bench, pool: WatchedPool, seconds: float) -> Figures:
    """Groups that share GPUs, each kept busy: what came out of each, and the longest time in which one of them gave nothing."""
    ends = time.perf_counter() + seconds
    generator = random.Random(3)
    answered: dict[str, list[float]] = {}
    done: dict[str, int] = {}

    async def client(model: str) -> None:
        while time.perf_counter() < ends:
            prompt = prompts(1, generator.choice((32, 64, 200)), generator.randrange(10**6), bench.vocabulary)[0]
            (one,) = await pool.answers([pool.ask(model, prompt, generator.choice((16, 64, 96)) // (1 if bench.real else 4))])
            answered.setdefault(model, []).extend(one.times)
            done[model] = done.get(model, 0) + 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for model, clients in (("13b-two", 6), ("a", 6), ("b", 6)):
            for _ in range(clients):
                group.create_task(client(model))
    took = time.perf_counter() - began
    found: Figures = {"seconds": round(took, 2)}
    for model, times in answered.items():
        times.sort()
        gaps = [later - earlier for earlier, later in pairwise(times)]
        found[model] = {
            "requests": done[model],
            "tokens_per_s": round(len(times) / took, 1),
            "longest_silence_ms": round(max(gaps) * 1e3, 1),
        }
    return found


async def park_and_wake(pool: WatchedPool, bench: Bench, before: dict[int, int]) -> Figures:
    """Through the driver. `before`: bytes in use by rank before the model was loaded."""
    state = pool.core.state
    prompt = prompts(1, 32, 5, bench.vocabulary)[0]
    expected = (await pool.answers([pool.ask("c", prompt, 8)]))[0].tokens
    found: Figures = {"parks_s": [], "wakes_s": [], "first_token_of_a_parked_model_ms": [], "answers_right": True}

    def is_parked() -> bool:
        return next(state.of_model("c")).state == "parked"

    for _ in range(3):
        pool.core.on_set_residency(pool.now(), 0, "c", "parked")
        await pool.until(is_parked, 30)
        found["parks_s"].append(round(state.switches["park"].seconds[-1], 4))
        await asyncio.sleep(0.2)
        used = {rank: memory.used_bytes - memory.kept_bytes for rank, memory in pool.memory().items()}
        found["left_behind_bytes"] = used[0] - before[0]
        (one,) = await pool.answers([pool.ask("c", prompt, 8)])
        found["first_token_of_a_parked_model_ms"].append(round((one.times[0] - one.began) * 1e3, 1))
        found["wakes_s"].append(round(state.switches["wake"].seconds[-1], 4))
        found["answers_right"] = found["answers_right"] and one.tokens == expected
    found["ledger"] = pool.ledger()
    return found


async def remap(bench: Bench, pool: WatchedPool) -> Figures:
    """Model a fills what the pool has left with KV and ends; then model c needs 8 GiB of it."""
    count, length = (40, 1000) if bench.real else (6, 100)
    await pool.answers([pool.ask("a", prompt, 40) for prompt in prompts(count, length, 1, bench.vocabulary)])
    groups = {group.model: group for group in pool.core.state.groups.values()}
    held, since = groups["a"].kv_blocks, time.perf_counter()
    keys = [pool.ask("c", prompt, 16) for prompt in prompts(16 if bench.real else 6, length, 2, bench.vocabulary)]
    answered = await pool.answers(keys)
    ops = [grown for grown in pool.grown.values() if grown.began >= since]
    block_bytes = {group.id: max(group.sizing.block_bytes.values()) for group in groups.values() if group.sizing}
    rows = []
    blocks = {groups["a"].id: held, groups["c"].id: 0}
    for grown in ops:
        if grown.group_id in blocks:
            moved = (grown.blocks - blocks[grown.group_id]) * block_bytes[grown.group_id]
            blocks[grown.group_id] = grown.blocks
            model = "a" if grown.group_id == groups["a"].id else "c"
            rows.append({"model": model, "moved_gib": round(moved / GIB, 2), "ms": round((grown.ended - grown.began) * 1e3, 2)})
    moved = [row for row in rows if abs(row["moved_gib"]) >= 1]
    return {
        "a_held_gib": round(held * block_bytes[groups["a"].id] / GIB, 2),
        "changes": rows,
        "ms_a_gib": spread([row["ms"] / abs(row["moved_gib"]) for row in moved]) if moved else None,
        "c": figures_of(answered),
    }


async def bursts(bench: Bench, pool: WatchedPool, models: list[str], seconds: float) -> Figures:
    """Every model is idle most of the time, then gets a burst: requests whose first token came within 1 s, and 50 ms a token."""
    began = time.perf_counter()
    keys = []
    rate = 0.8 * len(models)
    for arrival in generate(models, seconds, rate, seed=11, zipf=0.0, variation=3.0, prompt_tokens=128, output_tokens=64):
        await asyncio.sleep(max(0.0, began + arrival.time_s - time.perf_counter()))
        prompt = prompts(1, min(arrival.prompt_tokens, 1024), len(keys), bench.vocabulary)[0]
        keys.append(pool.ask(arrival.model, prompt, max(2, arrival.output_tokens // bench.scale)))
    found = await pool.answers(keys, 30)
    firsts = [(one.times[0] - one.began) * 1e3 for one in found]
    paces = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) * 1e3 for one in found]
    within = sum(first <= 1000 and pace <= 50 for first, pace in zip(firsts, paces, strict=True))
    switches = {path: {"count": each.count} for path, each in pool.core.state.switches.items()}
    return {
        "models": len(models),
        "requests": len(found),
        "within_slo": within,
        "first_token_ms": spread(firsts),
        "ms_a_token": spread(paces),
        "switches": switches,
    }


async def run(bench: Bench) -> None:
    pool = bench.new_pool(2, 64 * GIB)
    pool.start()
    try:
        await with_two_gpus(bench, pool)
    finally:
        bench.keep_log(pool)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(15):
                await pool.close(end_ranks=True)
        bench.save()
    await bench.part("memory_not_given", 25, 60, lambda: memory_not_given(bench))


async def with_two_gpus(bench: Bench, pool: WatchedPool) -> None:
    async def ranks_up() -> Figures:
        imports = asyncio.create_task(asyncio.to_thread(__import__, "torch"))  # meanwhile
        await pool.until(lambda: pool.core.state.ranks_up, 60)
        await imports
        return {"welcome": pool.ledger()}

    if not await bench.part("ranks", 5, 60, ranks_up):
        return
    if bench.real:
        await bench.part("links", 10, 25, lambda: asyncio.to_thread(links, bench))
    wanted = {
        "13b-one": (bench.spec("13b", 1, 2), ONE),
        "13b-two": (bench.spec("13b", 8, 6), BOTH),
        "a": (bench.spec("7b", 40, 20), ONE),
        "b": (bench.spec("7b", 8, 6), OTHER),
    }

    async def load() -> Figures:
        began = time.monotonic()
        await pool.bring(wanted, 90)
        return {"load_s": round(time.monotonic() - began, 1), "events": [list(each) for each in pool.events]}

    if not await bench.part("load", 15, 75, load):
        return
    await bench.part("one_gpu", 8, 20, lambda: one_gpu(bench, pool))
    if not await bench.part("tensor_parallel", 8, 20, lambda: tensor_parallel(bench, pool)):
        return  # its ranks wait for each other, and nothing else would run beside them
    await bench.part("shared_load", 17, 30, lambda: shared_load(bench, pool, 15 if bench.real else 3))
    del wanted["13b-one"]
    before: dict[int, int] = {}

    async def third_model() -> Figures:
        await pool.bring(wanted, 20)
        before.update({rank: memory.used_bytes - memory.kept_bytes for rank, memory in pool.memory().items()})
        wanted["c"] = (bench.spec("7b", 16, 12), ONE)
        began = time.monotonic()
        await pool.bring(wanted, 40)
        return {"load_s": round(time.monotonic() - began, 1), "used_before_bytes": before}

    if not await bench.part("third_model", 8, 40, third_model):
        return
    await bench.part("remap", 4, 25, lambda: remap(bench, pool))
    if bench.real:
        await bench.part("park_and_wake", 8, 40, lambda: park_and_wake(pool, bench, before))
    if bench.deadline - time.monotonic() > 75:
        await bench.part("bursts", 40, 60, lambda: bursts(bench, pool, ["a", "b", "c"], 12))


def links(bench: Bench) -> Figures:
    import torch

    from ops.bench.pool_links import measure_links

    bench.result["card"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    bench.result["torch"] = torch.__version__
    return measure_links(13_476_298_752 // (32 * 8) * (32 * 8), 3)


async def memory_not_given(bench: Bench) -> Figures:
    """New ranks, which take what the cards have."""
    pool = bench.new_pool(2, None)
    pool.start()
    try:
        await pool.until(lambda: pool.core.state.ranks_up, 40)
        await pool.bring({"13b-two": (bench.spec("13b", 8, 6), BOTH)}, 50)
        return {**await single_stream(bench, pool, "13b-two", 3), "ledger": pool.ledger()}
    finally:
        bench.keep_log(pool)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(10):
                await pool.close(end_ranks=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=140.0, help="no part begins that would not end within so long")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        bench.save()
        asyncio.run(run(bench))
        bench.result["seconds"] = round(time.monotonic() - began, 1)
        bench.save()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of parts that were given up


if __name__ == "__main__":
    main()
