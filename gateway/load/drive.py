"""Keeps so many requests open at a target, until so many were asked or so long has passed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.load.report import Outcome
from gateway.load.targets import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` or `duration_s` ends it. `varied`: lengths between a quarter and the whole, and one request in `cancel_one_in`
    is left in its middle, as clients do."""

    model: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int | None = None
    duration_s: float | None = None
    varied: bool = False
    cancel_one_in: int = 0
    seed: int = 1


async def run(plan: Plan, target: Target, progress: Callable[[int], None] = lambda done: None) -> tuple[list[Outcome], float]:
    """The outcomes in the order in which they began, and how long it took. `progress` is told how many have ended."""
    began, ended = time.perf_counter(), 0
    outcomes: list[Outcome] = []
    rng = random.Random(plan.seed)

    def goes_on() -> bool:
        if plan.requests is not None and len(outcomes) >= plan.requests:
            return False
        return plan.duration_s is None or time.perf_counter() - began < plan.duration_s

    async def client() -> None:
        nonlocal ended
        while goes_on():
            outcome = Outcome(time.perf_counter() - began)
            outcomes.append(outcome)
            share = rng.uniform(0.25, 1.0) if plan.varied else 1.0
            sizes = (max(int(plan.input_tokens * share), 1), max(int(plan.output_tokens * share), 1))
            leaves = plan.cancel_one_in and rng.randrange(plan.cancel_one_in) == 0
            await _ask(plan.model, target, sizes, outcome, rng, rng.uniform(0.01, 0.5) if leaves else None)
            ended += 1
            progress(ended)
            if outcome.error:
                await asyncio.sleep(0.05)  # what refuses at once is not asked ten thousand times a second

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(client())
    return outcomes, time.perf_counter() - began


async def _ask(
    model: str, target: Target, sizes: tuple[int, int], outcome: Outcome, rng: random.Random, leave_s: float | None
) -> None:
    asked = time.perf_counter()
    try:
        async with asyncio.timeout(leave_s) if leave_s is not None else contextlib.nullcontext():
            await target.ask(model, *sizes, outcome, rng)
    except TimeoutError:
        outcome.cancelled = True
    outcome.total_s = outcome.total_s or time.perf_counter() - asked
