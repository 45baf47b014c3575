"""A pool driver as a benchmark holds it: the real loop and rank processes, requests from here, and when what happened."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import ModelSpec, PoolSpec
from ops.bench.timing import Figures, spread
from workers.driver.effects import Ended, ModelFacts, RequestKey
from workers.driver.group import Wanted
from workers.driver.local_ranks import LocalRanks
from workers.driver.loop import PoolLoop
from workers.driver.sequence import Request
from workers.driver.sizing import Placement
from workers.messages import Command, DeviceMemory, Done, GrowKv, Report, SampledToken
from workers.rank.config import RankConfig

SECRET = "benchmark"
STANDBY_BYTES = 16 * 2**30
LINK = 1
RANK_MODULE = "ops.bench.random_rank"


class Reader:
    """Facts from headers; canaries are not judged."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        found = open_checkpoint(spec.source, self._cache_dir)
        return ModelFacts(found.shape, found.digest, found.precision, found.max_context, ())

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 2, 3, 4)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return ""


class Nobody:
    """Observes nothing."""

    def event(self, kind: str, subject: str, message: str) -> None: ...

    def changed(self) -> None: ...


@dataclass
class Asked:
    began: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None


@dataclass
class Grown:
    """One change of a group's KV: how long all its ranks took."""

    group_id: int
    blocks: int
    began: float
    pending: int
    ended: float = 0.0


class WatchedPool(PoolLoop):
    """`memory` None: what the cards have."""

    def __init__(
        self, directory: Path, cache_dir: Path, devices: int, memory: int | None, ranks: str, standby_bytes: int = STANDBY_BYTES
    ) -> None:
        self.directory = directory
        config = RankConfig("bench", 0, "cuda", memory or 0, directory, cache_dir, 30.0, SECRET, standby_bytes=standby_bytes)
        launcher = LocalRanks(config, devices, module=ranks)
        spec = PoolSpec(device="cuda", devices=devices, memory=memory, standby=standby_bytes)
        super().__init__("bench", spec, launcher, Reader(cache_dir), Nobody(), SECRET)
        self.asked: dict[RequestKey, Asked] = {}
        self.grown: dict[int, Grown] = {}
        self.events: list[tuple[float, str, str, str]] = []
        self._ids = 0
        self._fences = 0

    async def bring(self, wanted: dict[str, tuple[ModelSpec, Placement]], timeout_s: float) -> None:
        """Returns when all of them serve. RuntimeError when one does not."""
        self._fences += 1
        models = [Wanted(name, 1, spec, spec.model_dump_json(), placement) for name, (spec, placement) in wanted.items()]
        self.assign(self._fences, self._fences, models)
        await self.until(lambda: self._settled(set(wanted)), timeout_s)

    def _settled(self, models: set[str]) -> bool:
        groups = list(self.core.state.groups.values())
        for group in groups:
            if group.state == "failed" and group.attempts > 1:
                raise RuntimeError(f"model {group.model}: {group.reason}")
        return {group.model for group in groups} == models and all(group.state in ("ready", "parked", "cold") for group in groups)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """TimeoutError says how things stand."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        except TimeoutError:
            state = self.core.state
            raise TimeoutError(f"{state.message} {[(g.model, g.state, g.reason) for g in state.groups.values()]}") from None

    def ask(self, model: str, prompt: Sequence[int], max_tokens: int) -> RequestKey:
        self._ids += 1
        key = (LINK, self._ids)
        self.asked[key] = Asked(time.perf_counter())
        self.submit([Request(key, model, tuple(prompt), max_tokens, ignore_eos=True)])
        return key

    async def answers(self, keys: Sequence[RequestKey], timeout_s: float = 60.0) -> list[Asked]:
        await self.until(lambda: all(self.asked[key].ended for key in keys), timeout_s)
        found = [self.asked[key] for key in keys]
        bad = [one.ended for one in found if one.ended and one.ended.finish_reason != "length"]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(found)} requests did not end well: {bad[0]}")
        return found

    def faults(self) -> dict[str, int]:
        """How often what should not happen did."""
        kinds = [kind for _, kind, _, _ in self.events if kind.endswith(("failed", "refused", "lost"))]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def memory(self) -> dict[int, DeviceMemory]:
        return dict(self.core.state.device_memory)

    def ledger(self) -> Figures:
        """By rank: lines summed by model and kind, and what the card says beside them."""
        state = self.core.state
        found: Figures = {}
        for rank in range(len(state.capacities)):
            lines: dict[str, int] = {}
            for owner, kind, size in state.ledger.lines(rank):
                group = state.groups.get(owner) if isinstance(owner, int) else None
                name = f"{group.model if group else owner} {kind}"
                lines[name] = lines.get(name, 0) + size
            memory = state.device_memory.get(rank)
            found[str(rank)] = {
                "capacity_bytes": state.capacities[rank],
                "lines": lines,
                "used_bytes_by_the_card": memory.used_bytes if memory else 0,
                "kept_bytes": memory.kept_bytes if memory else 0,
                "unaccounted_bytes": state.unaccounted_bytes(rank),
            }
        return found

    # ---------------------------------------------------------------- effects, watched

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        if one := self.asked.get(key):  # not the canary
            one.times.append(time.perf_counter())
            one.tokens.append(token.token)

    def end(self, key: RequestKey, ended: Ended) -> None:
        if one := self.asked.get(key):
            one.ended = ended

    def send(self, rank: int, command: Command) -> None:
        if isinstance(command, GrowKv):
            grown = self.grown.setdefault(command.op, Grown(command.group_id, command.blocks, time.perf_counter(), 0))
            grown.pending += 1
        super().send(rank, command)

    def event(self, kind: str, subject: str, message: str) -> None:
        self.events.append((time.perf_counter(), kind, subject, message))
        super().event(kind, subject, message)

    def _on_report(self, rank: int, report: Report) -> None:
        if isinstance(report, Done) and (grown := self.grown.get(report.op)):
            grown.pending -= 1
            grown.ended = time.perf_counter()
        super()._on_report(rank, report)


def prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, vocabulary - 1) for _ in range(length)] for _ in range(count)]


def figures_of(found: Sequence[Asked]) -> Figures:
    """Of requests that were sent at once."""
    began = min(one.began for one in found)
    ended = max(one.times[-1] for one in found)
    tokens = sum(len(one.tokens) for one in found)
    steps = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) * 1e3 for one in found if len(one.times) > 1]
    return {
        "requests": len(found),
        "tokens_per_s": round(tokens / (ended - began), 1),
        "first_token_ms": spread([(one.times[0] - one.began) * 1e3 for one in found]),
        "ms_a_token": spread(steps) if steps else None,
    }
