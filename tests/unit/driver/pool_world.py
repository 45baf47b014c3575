"""A pool core with everything around it in one process: ranks that compute from their KV blocks, a recorder of effects.

The next token is a function of the tokens that lie in a sequence's blocks, so that any mistake in blocks, prefixes,
preemption or order gives another text than `expected_text`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec
from gateway.api.errors import ErrorCode
from placement.types import ModelShape
from workers.driver.core import PoolCore
from workers.driver.effects import Ended, ModelFacts, RequestKey
from workers.driver.group import Group, Wanted
from workers.driver.sequence import Request
from workers.driver.sizing import Placement, pages, size_group
from workers.engines.trtllm.messages import Cancel, Generate
from workers.messages import (
    Command,
    Constrain,
    Constrained,
    Done,
    GrowKv,
    HeldShard,
    LoadShard,
    ParkShard,
    SampledToken,
    Sampling,
    Step,
    StepDone,
    UnloadShard,
    WakeShard,
)

MIB = 2**20
VOCABULARY = 50
EOS = VOCABULARY - 1
BLOCK_TOKENS = 16

# One KV block of 16 tokens is 1 MiB on a rank that holds both layers; 16 blocks hold the context of 256 tokens.
SHAPE = ModelShape(
    family="llama",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=1024,
    intermediate=128,
    vocabulary=VOCABULARY,
    max_context=256,
    tied_embeddings=True,
    layer_bytes=(4 * MIB, 4 * MIB),
    embedding_bytes=MIB,
    head_bytes=0,
)
FACTS = ModelFacts(SHAPE, digest="d1", precision="bf16", max_context=256, eos_ids=(EOS,))


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("q", tokens).tobytes()) % (VOCABULARY - 1)


def expected_text(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def spec(**changes: object) -> ModelSpec:
    base: dict[str, object] = {
        "source": "file:/nowhere",
        "kv": KvSpec(floor=16 * MIB, block_tokens=BLOCK_TOKENS),
        "limits": LimitsSpec(concurrency=4, queue=8, batch_tokens=32),
    }
    return ModelSpec.model_validate({**base, **changes})


def wanted(model: str = "m", ranks: tuple[int, ...] = (0,), *, stages: int = 1, generation: int = 1, **changes: object) -> Wanted:
    model_spec = spec(**changes)
    placement = Placement(ranks, len(ranks) // stages, stages)
    return Wanted(model, generation, model_spec, model_spec.model_dump_json(), placement)


# What one group of `wanted()` reserves while it loads, and what it holds once it was measured.
LOAD_MIB = sum(size_group("m", spec(), FACTS, Placement((0,), 1, 1), "cpu").budget[0].values()) // MIB
HELD_MIB = 9 + 16 + 1


class SimulatedRank:
    """Executes commands in order like a real one, and refuses what a real one would choke on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shards: dict[int, LoadShard] = {}
        self.blocks: dict[int, int] = {}  # group -> mapped
        self.memory: dict[tuple[int, int], list[int]] = {}  # (group, block) -> tokens in it
        self.tables: dict[tuple[int, int], list[int]] = {}  # (group, sequence) -> block table
        self.last_samples: dict[tuple[int, int], int] = {}
        self.load_error = ""
        self.park_error = ""
        self.wake_error = ""
        self.parkable = True
        self.step_seconds: dict[str, float] = {}  # by model, what its steps say that they took
        self.parked: set[int] = set()
        self.keeps_copies = False  # as GPUs do: a copy outlives the wake, and the next park costs nothing
        self.copies: set[int] = set()
        self.grow_error = ""
        self.executed: list[Command] = []
        self.compiled: set[int] = set()  # sequences whose schemas are at hand
        self.schema_error = ""
        self.compiles = True  # else it never gets done with a schema

    def held(self, group_id: int) -> HeldShard:
        load = self.shards[group_id]
        parked = group_id in self.parked
        weights = 9 * MIB // load.pipeline_parallel
        return HeldShard(
            group_id=group_id,
            model=load.model,
            spec_json=load.spec_json,
            ranks=load.ranks,
            tensor_parallel=load.tensor_parallel,
            pipeline_parallel=load.pipeline_parallel,
            kv_blocks=self.blocks[group_id],
            kv_ceiling_blocks=load.kv_ceiling_blocks,
            kv_block_tokens=load.kv_block_tokens,
            bytes={
                "weights": 0 if parked else weights,
                "kv": pages(self.blocks[group_id] * MIB // load.pipeline_parallel),
                "workspace": 0 if parked else MIB,
            },
            parkable=self.parkable,
            parked=parked,
            standby_bytes=weights if parked or group_id in self.copies else 0,
            wake_bytes={"weights": weights, "workspace": MIB} if parked else {},
            digest="d1",
            precision="bf16",
            context=256,
        )

    def execute(self, command: Command) -> Done | StepDone | Constrained | None:
        self.executed.append(command)
        match command:
            case LoadShard():
                if self.load_error:
                    return Done(command.op, self.load_error)
                assert command.group_id not in self.shards, "a group id was used twice"
                self.shards[command.group_id] = command
                self.blocks[command.group_id] = command.kv_floor_blocks
                return Done(command.op, held=self.held(command.group_id))
            case UnloadShard():
                self.shards.pop(command.group_id, None)
                self.parked.discard(command.group_id)
                self.copies.discard(command.group_id)
                self.blocks.pop(command.group_id, None)
                for table in (self.memory, self.tables):
                    for key in [key for key in table if key[0] == command.group_id]:
                        del table[key]
                return Done(command.op)
            case GrowKv():
                if self.grow_error and command.blocks > self.blocks[command.group_id]:
                    return Done(command.op, self.grow_error)
                self.blocks[command.group_id] = command.blocks
                for key in [key for key in self.memory if key[0] == command.group_id and key[1] >= command.blocks]:
                    del self.memory[key]
                return Done(command.op, held=self.held(command.group_id))
            case ParkShard():
                for sequence in command.released:
                    del self.tables[command.group_id, sequence]
                assert not any(key[0] == command.group_id for key in self.tables), "parked under a sequence"
                if self.park_error:
                    return Done(command.op, self.park_error, held=self.held(command.group_id))
                assert not self.parked & set(command.drop_copies), "the only copy of a parked model"
                self.copies.difference_update(command.drop_copies)
                if self.keeps_copies:
                    self.copies.add(command.group_id)
                self.parked.add(command.group_id)
                self.blocks[command.group_id] = 0
                for key in [key for key in self.memory if key[0] == command.group_id]:
                    del self.memory[key]
                return Done(command.op, held=self.held(command.group_id))
            case WakeShard():
                if self.wake_error:
                    return Done(command.op, self.wake_error, held=self.held(command.group_id))
                if command.group_id in self.parked:
                    self.parked.discard(command.group_id)
                    self.blocks[command.group_id] = command.kv_blocks
                return Done(command.op, held=self.held(command.group_id))
            case Constrain():
                self.compiled.discard(command.sequence)
                if not command.json_schema or not self.compiles:
                    return None
                if not self.schema_error:
                    self.compiled.add(command.sequence)
                return Constrained(command.group_id, command.sequence, self.schema_error, 3 * MIB)
            case Step():
                return self._step(command)
            case _:
                return None

    def _step(self, step: Step) -> StepDone | None:
        load = self.shards[step.group_id]
        assert step.group_id not in self.parked, "a step of a parked group"
        for sequence in step.released:
            assert self.tables.pop((step.group_id, sequence), None) is not None, "released a sequence that is not known"
        assert step.sequences, "an empty step"
        assert (
            sum(max(len(part.tokens), 1) for part in step.sequences)
            <= ModelSpec.model_validate_json(load.spec_json).limits.batch_tokens
        )
        sampled = []
        for part in step.sequences:
            key = (step.group_id, part.sequence)
            if part.new is not None:
                assert key not in self.tables, "introduced twice without a release"
                if part.new.constrained and self.rank in load.ranks[-load.tensor_parallel :]:
                    self.compiled.remove(part.sequence)
                self.tables[key] = []
            table = self.tables[key]
            table.extend(part.new_blocks)
            assert all(block < self.blocks[step.group_id] for block in part.new_blocks), "a block that is not mapped"
            tokens = part.tokens or (self.last_samples[key],)
            for position, token in enumerate(tokens, part.start):
                content = self.memory.setdefault((step.group_id, table[position // BLOCK_TOKENS]), [])
                del content[position % BLOCK_TOKENS :]
                assert len(content) == position % BLOCK_TOKENS, "a hole in a block"
                content.append(token)
            if part.sample:
                end = part.start + len(tokens)
                known: list[int] = []
                for block in table[: -(-end // BLOCK_TOKENS)]:
                    known.extend(self.memory[step.group_id, block][:BLOCK_TOKENS])
                self.last_samples[key] = next_token(known[:end])
                sampled.append(SampledToken(part.sequence, self.last_samples[key], -0.5))
        last_stage = load.ranks[-load.tensor_parallel]
        seconds = self.step_seconds.get(load.model, 0.0)
        return StepDone(step.step, step.group_id, tuple(sampled), seconds) if self.rank == last_stage else None


class World:
    """Is the core's `Effects`. `run` answers everything until nothing is left to do."""

    def __init__(self, ranks: int = 1, capacity_mib: int = 200, *, up: bool = True) -> None:
        self.now = 100.0
        self.ranks = [SimulatedRank(rank) for rank in range(ranks)]
        self.core = PoolCore("cpu", [capacity_mib * MIB] * ranks, self)
        self.pending: deque[Callable[[], None]] = deque()
        self.inboxes: list[deque[Command]] = [deque() for _ in range(ranks)]
        self.sent: list[tuple[int, Command]] = []
        self.texts: dict[RequestKey, list[int]] = {}
        self.ends: dict[RequestKey, Ended] = {}
        self.holds: dict[RequestKey, tuple[str, float]] = {}
        self.events: list[tuple[str, str, str]] = []
        self.restarts: list[str] = []
        self.engine: list[Generate | Cancel] = []  # what hosted groups' engines were told
        self.dropped: list[int] = []
        self.facts: dict[str, ModelFacts | str] = {}
        self.canary_problem: dict[str, str] = {}
        self.canary_answers: list[tuple[str, str, list[int]]] = []
        self.next_id = 1
        if up:
            self.core.on_ranks_up(self.now, dict.fromkeys(range(ranks), ()))

    # ------------------------------------------------------------------ effects

    def send(self, rank: int, command: Command) -> None:
        self.sent.append((rank, command))
        self.inboxes[rank].append(command)

    def to_engine(self, group_id: int, message: Generate | Cancel) -> None:
        del group_id
        self.engine.append(message)

    def drop_engine(self, group_id: int) -> None:
        self.dropped.append(group_id)

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        assert key not in self.ends, "a token after the end"
        self.texts.setdefault(key, []).append(token.token)

    def end(self, key: RequestKey, ended: Ended) -> None:
        assert key not in self.ends, "ended twice"
        self.ends[key] = ended

    def hold(self, key: RequestKey, reason: str, wait_s: float) -> None:
        self.holds[key] = (reason, wait_s)

    def inspect(self, group_id: int, model: str, spec: ModelSpec) -> None:
        self.pending.append(lambda: self.core.on_inspected(self.now, group_id, self.facts.get(model, FACTS)))

    def prepare_canary(self, group_id: int, model: str, spec: ModelSpec) -> None:
        self.pending.append(lambda: self.core.on_canary_prompt(self.now, group_id, (1, 2, 3)))

    def judge_canary(self, group_id: int, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> None:
        self.canary_answers.append((model, placement, list(tokens)))
        problem = self.canary_problem.get(model, "")
        self.pending.append(lambda: self.core.on_canary_judged(self.now, group_id, problem))

    def restart_ranks(self, reason: str) -> None:
        self.restarts.append(reason)
        self.pending.clear()
        for inbox in self.inboxes:
            inbox.clear()

    def event(self, kind: str, subject: str, message: str) -> None:
        self.events.append((kind, subject, message))

    def changed(self) -> None:
        pass

    # ------------------------------------------------------------------ what tests do

    def assign(self, *groups: Wanted, fence: int = 1) -> None:
        self.core.on_assign(self.now, fence, 1, groups)

    def submit(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 4,
        *,
        model: str = "m",
        link: int = 1,
        timeout_s: float | None = None,
        json_schema: str = "",
        **changes: object,
    ) -> RequestKey:
        key = (link, self.next_id)
        self.next_id += 1
        deadline = None if timeout_s is None else self.now + timeout_s
        self.core.on_submit(
            self.now,
            Request(
                key,
                model,
                tuple(prompt),
                max_tokens,
                Sampling(json_schema=json_schema),
                deadline=deadline,
                **changes,  # type: ignore[arg-type]
            ),
        )
        return key

    def turn(self, *, loads: bool = True) -> bool:
        """Answer what is oldest: the driver's own slow work, then one command on every rank. False when there is nothing."""
        if self.pending:
            self.pending.popleft()()
            return True
        worked = False
        for rank, inbox in enumerate(self.inboxes):
            if inbox and (loads or not isinstance(inbox[0], LoadShard)):
                self.now += 0.01
                answer = self.ranks[rank].execute(inbox.popleft())
                worked = True
                if isinstance(answer, StepDone):
                    self.now += answer.seconds
                    self.core.on_step_done(self.now, answer)
                elif isinstance(answer, Constrained):
                    self.core.on_constrained(self.now, rank, answer)
                elif answer is not None:
                    self.core.on_op_done(self.now, rank, answer)
        self.core.state.check()
        return worked

    def run(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("does not come to rest")

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.core.on_tick(self.now)
        self.run()

    def lose_ranks(self, reason: str = "rank 0 is gone") -> None:
        self.core.on_ranks_lost(self.now, reason)
        self.ranks = [SimulatedRank(rank) for rank in range(len(self.ranks))]

    def ranks_up(self) -> None:
        self.core.on_ranks_up(self.now, dict.fromkeys(range(len(self.ranks)), ()))

    def group(self, model: str = "m") -> Group:
        groups = list(self.core.state.of_model(model))
        assert len(groups) == 1, groups
        return groups[0]

    def states(self, model: str = "m") -> list[str]:
        return [group.state for group in self.core.state.of_model(model)]

    def error(self, key: RequestKey) -> ErrorCode | None:
        return self.ends[key].error_code

    def ready(self, *groups: Wanted) -> World:
        self.assign(*(groups or (wanted(),)))
        self.run()
        assert all(group.state == "ready" for group in self.core.state.groups.values()), self.events
        return self

    def steps(self) -> list[Step]:
        return [command for rank, command in self.sent if isinstance(command, Step)]
