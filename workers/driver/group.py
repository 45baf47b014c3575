"""A worker group as the driver sees it: what it should be, how far it is, and what it computes. Data; decisions are elsewhere.

Its states and what leads from one to the other are in `residency`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gateway.api.config import ModelSpec
from gateway.api.load_key import load_key
from placement.types import Measured
from workers.driver.batching import Batcher, StepPlan
from workers.driver.effects import ModelFacts
from workers.driver.residency import State
from workers.driver.sequence import Sequence
from workers.driver.sizing import GroupSizing, Placement
from workers.memory.ledger import Shortage
from workers.messages import HeldShard

MAX_ATTEMPTS = 5
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """One worker group of the newest assignment."""

    model: str
    generation: int
    spec: ModelSpec
    spec_json: str
    placement: Placement
    measured: Measured | None = None  # what earlier loads of this sort took, by which it was placed


@dataclass
class Op:
    """Something all ranks of a group do, and of which each reports the end."""

    id: int
    kind: Literal["load", "unload", "kv", "park", "wake"]
    group_id: int
    pending: set[int]  # ranks
    blocks: int = 0
    began_at: float = 0.0
    heard_at: float | None = None  # when a rank last said something of it; None: nobody has looked yet
    errors: dict[int, str] = field(default_factory=dict)
    progress: dict[int, float] = field(default_factory=dict)


@dataclass
class StepInFlight:
    plan: StepPlan
    sent_at: float


@dataclass(eq=False)
class Group:
    id: int
    wanted: Wanted
    state: State = "waiting"
    reason: str = ""
    unwanted: bool = False  # not in the newest assignment: drains, or goes before it began
    facts: ModelFacts | None = None
    inspecting: bool = False
    sizing: GroupSizing | None = None
    sized_by: Measured | None = None
    held: dict[int, HeldShard] = field(default_factory=dict)  # by rank
    op: Op | None = None
    batcher: Batcher | None = None
    steps: dict[int, StepInFlight] = field(default_factory=dict)
    kv_blocks: int = 0  # mapped and reserved
    reclaim_to: int | None = None  # blocks that it must come down to, for the sake of others
    starving: tuple[Shortage, ...] = ()  # KV that its requests need and that no other group has to spare
    grow_denied_at: float | None = None
    idle_since: float | None = None
    attempts: int = 0
    retry_at: float | None = None
    load_began_at: float = 0.0  # or its park, or its wake
    ready_since: float = 0.0
    canary: Sequence | None = None
    progress_at: float = 0.0  # when it last ended a step, or got something to do
    tokens_per_s: float = 0.0  # generated, moving average
    reclaiming: bool = False  # waits for memory that others were asked to give back
    used_at: float = 0.0  # when a request came for it, or ended; not of copies that nobody waits for
    clock_s: float = 0.0  # see `step_shares`
    computing: bool = False  # it had something to do when steps were last sent
    wake_asked_at: float | None = None  # by an operator, or by a request that could not wait; until it is ready or failed
    drop_asked: bool = False  # its standby copy is to go too
    park_retry_at: float | None = None  # a park failed; not before then again
    proven: bool = False  # it served, or its shards did before this driver
    gives_way: bool = False  # to a newer generation; until it is ready or failed
    damaged_at: float | None = None  # when its weights last gave no numbers

    @property
    def model(self) -> str:
        return self.wanted.model

    @property
    def spec(self) -> ModelSpec:
        return self.wanted.spec

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.wanted.placement.ranks

    @property
    def hosted(self) -> bool:
        """Its engine has processes of its own, beside the ranks of the pool, and schedules its requests itself."""
        return self.spec.engine == "trtllm"

    @property
    def name(self) -> str:
        return f"{self.model}#{self.id}"

    @property
    def progress(self) -> float:
        if self.state in ("checking", "ready", "draining", "parking", "parked"):
            return 1.0
        if self.op is None or self.op.kind != "load":
            return 0.0
        return sum(self.op.progress.values()) / len(self.ranks)

    @property
    def wake_asked(self) -> bool:
        return self.wake_asked_at is not None

    @property
    def full(self) -> bool:
        """More would wait for those that run."""
        limits = self.spec.limits
        return self.running + self.waiting > limits.concurrency - (limits.queue == 0)

    @property
    def outstanding_tokens(self) -> int:
        return self.batcher.outstanding_tokens if self.batcher else 0

    @property
    def waiting(self) -> int:
        return len(self.batcher.waiting) if self.batcher else 0

    @property
    def running(self) -> int:
        return len(self.batcher.running) if self.batcher else 0

    @property
    def computes(self) -> bool:
        """It has something to do, or a step in flight."""
        return bool(self.steps or (self.batcher and self.batcher.busy))

    @property
    def wanted_by_somebody(self) -> bool:
        """Somebody waits for an answer of it; nobody does for copies."""
        batcher = self.batcher
        return batcher is not None and any(not sequence.request.shadow for sequence in (*batcher.running, *batcher.waiting))

    @property
    def quiet(self) -> bool:
        """Nothing in it and nothing on its way: its memory may be taken (rule 5)."""
        return self.op is None and not self.steps and not (self.batcher and self.batcher.busy)

    def matches(self, wanted: Wanted) -> bool:
        return (
            self.model == wanted.model
            and self.wanted.placement == wanted.placement
            and load_key(self.spec) == load_key(wanted.spec)
        )

    def placement_key(self, device: str) -> str:
        """What the greedy answer to a canary may depend on (rule 8): digest|engine|precision|tensor|pipeline|device."""
        held = next(iter(self.held.values()))
        placement = self.wanted.placement
        parts = (held.digest, self.spec.engine, held.precision, placement.tensor_parallel, placement.pipeline_parallel, device)
        return "|".join(map(str, parts))
