"""How many models one GPU serves well: N of 7B in one pool, against the same engine with its memory divided among them for good.

    python ops/bench/density.py --out DIR [--models 8 16] [--seconds N]
    python ops/bench/density.py --out DIR --device cpu        a rehearsal with tiny shapes and host memory

Real driver and rank process, random bf16 weights. Every model is idle most of the time and then asked in a burst: chats (short
prompts, longer answers) or documents (long prompts). Both sides replay the same trace. Divided: each model has its share of the
card less the context that a process of its own would pay, all KV within it; models beyond those that fit take turns in one share,
and are brought back as fast as the pool brings its own. A request is within the SLO when its first token came within 1 s and each
further one within 50 ms on average. Two more parts: what a park and a wake take through the driver, and three models of int8 in
24 GiB at once.

One GPU with 139 GiB and 110 GiB of host memory. DIR/density.json is written anew after every part.
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
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec
from ops.bench import shape_checkpoint as shapes
from ops.bench.timing import Figures, spread
from ops.bench.watched_pool import RANK_MODULE, Asked, WatchedPool, prompts
from placement.types import Arrival
from workers.driver.sizing import Placement

GIB = 2**30
PAGE_BYTES = 32 * 2**20
ONE = Placement((0,), 1, 1)
FIRST_TOKEN_S, TOKEN_S = 1.0, 0.05
CONCURRENCY, BATCH_TOKENS = 128, 4096
BURST_EVERY_S = 5.0  # of all models together
BURST_S = 0.5  # its requests come within


@dataclass(frozen=True)
class Kind:
    """What is asked: how much at once, and how long, each between two numbers."""

    requests: tuple[int, int]
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]

    @property
    def context(self) -> int:
        return self.prompt_tokens[1] + self.answer_tokens[1]


KINDS = {
    "chats": Kind(requests=(24, 56), prompt_tokens=(64, 384), answer_tokens=(128, 512)),
    "documents": Kind(requests=(8, 20), prompt_tokens=(1024, 1536), answer_tokens=(128, 384)),
}


def trace(kind: Kind, models: list[str], seconds: float, seed: int) -> list[Arrival]:
    """Bursts that come by chance, each to one model. The same for every way of serving it."""
    draw = random.Random(seed)
    found: list[Arrival] = []
    time_s = 0.0
    while (time_s := time_s + draw.expovariate(1 / BURST_EVERY_S)) < seconds:
        model = draw.choice(models)
        for _ in range(draw.randint(*kind.requests)):
            at_s = time_s + draw.uniform(0, BURST_S)
            found.append(Arrival(at_s, model, draw.randint(*kind.prompt_tokens), draw.randint(*kind.answer_tokens)))
    return sorted(found)


@dataclass(frozen=True)
class Sizes:
    """Of one model, as its load was measured, and of the card. Bytes."""

    capacity: int
    weights: int
    workspace: int
    context: int  # of one process
    loading: int  # what a load asks for beyond what the model then holds
    least_kv: int  # for a model of its own to be worth having

    def shares(self, models: int) -> tuple[int, int]:
        """Models that have a share of their own, and the KV bytes in each."""
        count = models
        while count > 1 and self._kv(count) < self.least_kv:
            count -= 1
        return count, self._kv(count)

    def _kv(self, count: int) -> int:
        share = (self.capacity - self.loading - (count - 1) * self.context) // count
        return (share - self.weights - self.workspace) // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.real: bool = options.device == "cuda"
        self.out: Path = options.out
        self.directory = directory
        self.deadline = time.monotonic() + options.seconds
        self.trace_s = 30.0 if self.real else 12.0
        self.vocabulary = shapes.VOCABULARY if self.real else 512
        shape = shapes.LLAMA_7B if self.real else shapes.TINY
        size = shapes.write(directory / "7b", directory / "cache", replace(shape, vocabulary=self.vocabulary))
        self.result: Figures = {"date": date.today().isoformat(), "device": options.device, "model_bytes": size, "parts": {}}

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "density.json").write_text(json.dumps(self.result, indent=1) + "\n")

    def keep(self, name: str, found: Figures) -> None:
        self.result["parts"][name] = found
        self.save()
        print(name, json.dumps(found), flush=True)

    def has(self, seconds: float, name: str) -> bool:
        left = self.deadline - time.monotonic()
        if left < seconds:
            self.keep(name, {"skipped": f"{left:.0f} s left"})
        return left >= seconds

    def pool(self, name: str, memory: int | None, standby: int) -> WatchedPool:
        memory = memory if self.real else GIB
        return WatchedPool(self.directory / name, self.directory / "cache", 1, memory, RANK_MODULE, standby)

    def spec(self, *, context: int, floor: int, ceiling: int, **changes: object) -> ModelSpec:
        limits = LimitsSpec(concurrency=CONCURRENCY, queue=4096, batch_tokens=BATCH_TOKENS)
        fields = {"precision": "bf16", "limits": limits, **changes}
        return ModelSpec(
            source=str(self.directory / "7b"),
            context=context,
            kv=KvSpec(floor=floor, ceiling=max(floor, ceiling), prefix_cache=False),
            **fields,  # type: ignore[arg-type]
        )


# -------------------------------------------------------------------- one way against the other


async def measured(bench: Bench, pool: WatchedPool) -> Sizes:
    """Loads one model, sees what it took, and lets it go."""
    empty = pool.memory().get(0)
    await pool.bring({"first": (bench.spec(context=1024, floor=GIB // 64, ceiling=GIB // 8), ONE)}, 90)
    lines = pool.ledger()["0"]["lines"]
    (group,) = pool.core.state.groups.values()
    assert group.sizing is not None
    await pool.bring({}, 30)
    return Sizes(
        capacity=pool.core.state.capacities[0],
        weights=lines["first weights"],
        workspace=lines["first workspace"],
        context=empty.used_bytes if empty else 0,
        loading=sum(group.sizing.budget[0].values()) - sum(lines.values()),
        least_kv=GIB if bench.real else GIB // 64,
    )


def pooled(bench: Bench, sizes: Sizes, models: list[str], context: int) -> dict[str, ModelSpec]:
    spec = bench.spec(context=context, floor=GIB // 4 if bench.real else GIB // 64, ceiling=sizes.capacity // 3)
    return dict.fromkeys(models, spec)


def divided(bench: Bench, sizes: Sizes, models: list[str], context: int) -> dict[str, ModelSpec]:
    """Where not all have a share, the last ones take turns in one."""
    count, kv = sizes.shares(len(models))
    fixed = models[: count if count == len(models) else count - 1]
    specs = {kept: bench.spec(context=context, floor=kv, ceiling=kv, residency=kept) for kept in ("resident", "auto")}
    return {name: specs["resident" if name in fixed else "auto"] for name in models}


async def replay(bench: Bench, pool: WatchedPool, arrivals: list[Arrival]) -> list[Asked]:
    began = time.perf_counter()
    keys = []
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(0.0, began + arrival.time_s - time.perf_counter()))
        prompt = prompts(1, arrival.prompt_tokens, number, bench.vocabulary)[0]
        keys.append(pool.ask(arrival.model, prompt, arrival.output_tokens if bench.real else arrival.output_tokens // 16))
    return await pool.answers(keys, 60)


def judged(found: list[Asked]) -> Figures:
    firsts = [one.times[0] - one.began for one in found]
    paces = [(one.times[-1] - one.times[0]) / max(1, len(one.times) - 1) for one in found]
    within = sum(first <= FIRST_TOKEN_S and pace <= TOKEN_S for first, pace in zip(firsts, paces, strict=True))
    late = sorted(firsts)
    return {
        "requests": len(found),
        "within_slo": within,
        "share_within_slo": round(within / len(found), 4),
        "first_token_ms": {**spread([first * 1e3 for first in firsts]), "p90": round(late[len(late) * 9 // 10] * 1e3, 1)},
        "ms_a_token": spread([pace * 1e3 for pace in paces]),
    }


async def serve(bench: Bench, pool: WatchedPool, specs: dict[str, ModelSpec], arrivals: list[Arrival]) -> Figures:
    began = time.monotonic()
    await pool.bring({name: (spec, ONE) for name, spec in specs.items()}, 120)
    loaded_s = time.monotonic() - began
    before = {path: each.count for path, each in pool.core.state.switches.items()}
    found = judged(await replay(bench, pool, arrivals))
    switches = {path: each.count - before.get(path, 0) for path, each in pool.core.state.switches.items()}
    ledger = pool.ledger()
    await pool.bring({}, 60)
    return {"load_s": round(loaded_s, 1), **found, "switches": switches, "ledger_at_the_end": ledger, "events": pool.faults()}


async def compare(bench: Bench, pool: WatchedPool, sizes: Sizes, kind: str, count: int) -> None:
    models = [f"m{number}" for number in range(count)]
    arrivals = trace(KINDS[kind], models, bench.trace_s, seed=11)
    shares, kv = sizes.shares(count)
    found: Figures = {"kind": kind, "models": count, "shares": shares, "kv_of_a_share_gib": round(kv / GIB, 2)}
    for name, make in (("pooled", pooled), ("divided", divided)):
        try:
            found[name] = await serve(bench, pool, make(bench, sizes, models, KINDS[kind].context), arrivals)
        except (RuntimeError, TimeoutError) as error:
            found[name] = {"failed": str(error)[:1000]}
            await pool.bring({}, 90)
    if all("within_slo" in found[name] for name in ("pooled", "divided")):
        found["ratio"] = round(found["pooled"]["within_slo"] / max(1, found["divided"]["within_slo"]), 2)
    bench.keep(f"{kind}_{count}", found)


# -------------------------------------------------------------------- switches, and a small card


async def switches(bench: Bench, pool: WatchedPool, sizes: Sizes) -> None:
    """Through the driver, beside a model that stays."""
    specs = pooled(bench, sizes, ["stays", "moves"], 1024)
    await pool.bring({name: (specs[name], ONE) for name in ("stays",)}, 90)
    state, prompt = pool.core.state, prompts(1, 32, 5, bench.vocabulary)[0]
    free_before = pool.memory()[0].used_bytes - pool.memory()[0].kept_bytes
    await pool.bring({name: (spec, ONE) for name, spec in specs.items()}, 90)
    expected = (await pool.answers([pool.ask("moves", prompt, 8)]))[0].tokens
    found: Figures = {"weights_bytes": sizes.weights, "answers_right": True}
    parks, wakes, firsts = [], [], []
    for _ in range(6):
        pool.core.on_set_residency(pool.now(), 0, "moves", "parked")
        await pool.until(lambda: next(state.of_model("moves")).state == "parked", 30)
        parks.append(state.switches["park"].seconds[-1] * 1e3)
        await asyncio.sleep(0.3)
        memory = pool.memory()[0]
        found["left_behind_bytes"] = memory.used_bytes - memory.kept_bytes - free_before
        (one,) = await pool.answers([pool.ask("moves", prompt, 8)])
        firsts.append((one.times[0] - one.began) * 1e3)
        wakes.append(state.switches["wake"].seconds[-1] * 1e3)
        found["answers_right"] = found["answers_right"] and one.tokens == expected
    found["first_park_ms"], found["park_ms"], found["wake_ms"] = round(parks[0], 1), spread(parks[1:]), spread(wakes)
    found["first_token_of_a_parked_model_ms"] = spread(firsts)
    found["wake_gb_s"] = round(sizes.weights / 1e6 / found["wake_ms"]["median"], 1)
    bench.keep("switches", found)
    await pool.bring({}, 30)


async def small_card(bench: Bench) -> None:
    """Three models of int8 in a ledger of 24 GiB, all asked at once."""
    pool = bench.pool("small", 24 * GIB, 0)
    pool.start()
    try:
        await pool.until(lambda: pool.core.state.ranks_up, 60)
        spec = bench.spec(
            context=512,
            floor=GIB // 4 if bench.real else GIB // 64,
            ceiling=2 * GIB,
            precision="int8" if bench.real else "bf16",
            residency="resident",
            limits=LimitsSpec(concurrency=16, queue=256, batch_tokens=1024),
        )
        began = time.monotonic()
        try:
            await pool.bring(dict.fromkeys("abc", (spec, ONE)), 60)
        except TimeoutError as error:
            bench.keep("small_card", {"not_loaded": str(error), "ledger": pool.ledger()})
            return
        loaded_s = time.monotonic() - began
        keys = [
            pool.ask(model, prompt, 64 if bench.real else 4)
            for number, model in enumerate("abc" * 12)
            for prompt in prompts(1, 64, number, bench.vocabulary)
        ]
        found = judged(await pool.answers(keys, 60))
        bench.keep("small_card", {"load_s": round(loaded_s, 1), **found, "failed": 0, "ledger": pool.ledger()})
    finally:
        await end(pool, bench)


async def end(pool: WatchedPool, bench: Bench) -> None:
    with contextlib.suppress(OSError):
        (bench.out / f"{pool.directory.name}.log").write_text((pool.directory / "ranks.log").read_text(errors="replace"))
    with contextlib.suppress(Exception):
        async with asyncio.timeout(20):
            await pool.close(end_ranks=True)


async def run(bench: Bench, counts: list[int]) -> None:
    pool = bench.pool("density", None, 102 * GIB if bench.real else GIB)
    pool.start()
    try:
        imports = asyncio.create_task(asyncio.to_thread(__import__, "torch"))  # meanwhile
        await pool.until(lambda: pool.core.state.ranks_up, 90)
        await imports
        sizes = await measured(bench, pool)
        bench.keep("sizes", {name: getattr(sizes, name) for name in ("capacity", "weights", "workspace", "context")})
        if bench.real:  # models in host memory do not park
            await switches(bench, pool, sizes)
        for kind in KINDS:
            for count in counts:
                if bench.has(70 + 4 * count, f"{kind}_{count}"):
                    await compare(bench, pool, sizes, kind, count)
    finally:
        await end(pool, bench)
    if bench.has(40, "small_card"):
        await small_card(bench)


def table(result: Figures) -> str:
    rows = []
    for part in result["parts"].values():
        if "ratio" in part:
            ours, theirs = part["pooled"], part["divided"]
            rows.append(
                f"{part['models']:>2} models, {part['kind']}: {ours['within_slo']} of {ours['requests']} within SLO in one pool, "
                f"{theirs['within_slo']} divided in {part['shares']} ({part['ratio']} x, target 3 at 8 and 16)"
            )
    if "wake_ms" in (found := result["parts"].get("switches", {})):
        rows.append(
            f"wake {found['wake_ms']['median']:.0f} ms ({found['wake_gb_s']} GB/s), park {found['park_ms']['median']:.1f} ms"
        )
        rows.append(f"left behind by a parked model {found['left_behind_bytes'] / GIB:.3f} GiB")
    if "failed" in (found := result["parts"].get("small_card", {})):
        rows.append(f"three models in 24 GiB: {found['requests']} requests, {found['failed']} failed")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--seconds", type=float, default=500.0, help="no part begins that would not end within so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        bench.save()
        asyncio.run(run(bench, options.models))
        if bench.real:
            import torch

            bench.result["card"], bench.result["torch"] = torch.cuda.get_device_name(0), torch.__version__
        bench.save()
        print(table(bench.result))
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of parts that were given up


if __name__ == "__main__":
    main()
