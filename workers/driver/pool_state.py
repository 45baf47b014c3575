"""Everything a pool driver knows, in one place. One loop owns it (rule 1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.driver.effects import RequestKey
from workers.driver.group import Group, Op, Wanted
from workers.driver.sequence import Request, Sequence
from workers.memory.ledger import Ledger


@dataclass
class Held:
    """A request that waits for its model to become ready."""

    request: Request
    arrival: int
    since: float


@dataclass
class Switches:
    """What the switches of one path took."""

    count: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=256))  # the newest ones


@dataclass(eq=False)
class PoolState:
    device: str  # cpu or cuda
    capacities: tuple[int, ...]  # bytes by rank
    next_sequence: int  # starts where no earlier driver's sequences are
    ledger: Ledger = field(init=False)
    standby_capacities: dict[int, int] = field(default_factory=dict)  # bytes of host memory by rank; ranks without: no limit
    ranks_up: bool = False
    fence: int = 0
    revision: int = 0
    assigned: bool = False  # an assignment has arrived
    wanted: list[Wanted] = field(default_factory=list)
    groups: dict[int, Group] = field(default_factory=dict)
    sequences: dict[RequestKey, tuple[Group, Sequence]] = field(default_factory=dict)
    held: dict[str, list[Held]] = field(default_factory=dict)  # by model
    ops: dict[int, Op] = field(default_factory=dict)
    load_times_s: dict[str, float] = field(default_factory=dict)  # by model, the last one measured
    move_bytes_per_s: dict[str, float] = field(default_factory=dict)  # of a rank's park or wake, the last one measured
    switches: dict[str, Switches] = field(default_factory=dict)  # by path: remap, park, wake, load
    next_group: int = 1
    next_op: int = 1
    next_step: int = 1
    next_arrival: int = 1
    turn: int = 0  # round robin among groups
    last_step_at: float = 0.0
    steps_done: int = 0
    message: str = ""
    closing: bool = False  # the driver stops: what runs is finished, nothing new is taken

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.capacities)

    def of_model(self, model: str) -> Iterator[Group]:
        return (group for group in self.groups.values() if group.model == model)

    def standby_bytes(self, rank: int) -> int:
        """Host memory that standby copies of this rank take."""
        return sum(group.held[rank].standby_bytes for group in self.groups.values() if rank in group.held)

    def switched(self, path: str, seconds: float) -> None:
        switches = self.switches.setdefault(path, Switches())
        switches.count += 1
        switches.seconds.append(seconds)

    def new_op_id(self) -> int:
        self.next_op += 1
        return self.next_op - 1

    def check(self) -> None:
        """AssertionError when the parts disagree. Run by tests, and by the driver when it is idle."""
        self.ledger.check()
        owners = self.ledger.owners()
        assert owners <= set(self.groups), f"ledger lines of groups that are gone: {owners - set(self.groups)}"
        for group in self.groups.values():
            if group.batcher is not None:
                group.batcher.check()
            if group.state in ("waiting", "failed", "cold") and group.op is None:
                assert group.id not in owners, f"group {group.name} is {group.state} and holds memory"
        for key, (group, sequence) in self.sequences.items():
            assert sequence.request.key == key
            assert not sequence.ended, f"request {key} has ended and is still known"
            assert group.batcher is not None
            assert sequence in group.batcher.running or sequence in group.batcher.waiting, f"request {key} is in no queue"
