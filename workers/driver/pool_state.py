"""Everything a pool driver knows, in one place. One loop owns it (rule 1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from gateway.api.buckets import Buckets
from gateway.api.records import DEVICE
from workers.driver.effects import RequestKey
from workers.driver.group import Group, Op, Wanted
from workers.driver.sequence import Request, Sequence
from workers.memory.ledger import Ledger
from workers.messages import DeviceMemory


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
    buckets: Buckets = field(default_factory=Buckets)
    bytes: int = 0
    link_share: float = 0.0  # of the last one


@dataclass
class Totals:
    """What was computed of one model."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failed: int = 0


@dataclass(eq=False)
class PoolState:
    device: str  # cpu or cuda
    capacities: tuple[int, ...]  # bytes by rank
    next_sequence: int  # starts where no earlier driver's sequences and operations are
    ledger: Ledger = field(init=False)
    standby_capacities: dict[int, int] = field(default_factory=dict)  # bytes of host memory by rank; ranks without: no limit
    ranks_up: bool = False
    fence: int = 0
    revision: int = 0
    assigned: bool = False  # an assignment has arrived
    adopting: bool = False  # ranks of an earlier driver may still be found, with groups that would be begun twice
    wanted: list[Wanted] = field(default_factory=list)
    groups: dict[int, Group] = field(default_factory=dict)
    sequences: dict[RequestKey, tuple[Group, Sequence]] = field(default_factory=dict)
    held: dict[str, list[Held]] = field(default_factory=dict)  # by model
    ops: dict[int, Op] = field(default_factory=dict)
    load_times_s: dict[str, float] = field(default_factory=dict)  # by model, the last one measured
    move_bytes_per_s: dict[str, float] = field(default_factory=dict)  # of a rank's park or wake, the last one measured
    switches: dict[str, Switches] = field(default_factory=dict)  # by path: remap, park, wake, load
    totals: dict[str, Totals] = field(default_factory=dict)  # by model
    link_bytes_per_s: float = 0.0  # of the slowest rank, host memory to device
    rank_restarts: int = 0
    next_group: int = 1
    next_op: int = field(init=False)  # unique over drivers too: ranks meet under the number of the load
    next_step: int = 1
    next_arrival: int = 1
    last_step_at: float = 0.0
    steps_done: int = 0
    device_memory: dict[int, DeviceMemory] = field(default_factory=dict)  # by rank, where ranks have devices of their own
    most_foreign: dict[int, int] = field(default_factory=dict)  # by rank, where engines were there before it
    message: str = ""
    closing: bool = False  # the driver stops: what runs is finished, nothing new is taken

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.capacities)
        self.next_op = self.next_sequence

    def of_model(self, model: str) -> Iterator[Group]:
        return (group for group in self.groups.values() if group.model == model)

    def standby_bytes(self, rank: int) -> int:
        """Host memory that standby copies of this rank take."""
        return sum(group.held[rank].standby_bytes for group in self.groups.values() if rank in group.held)

    def switched(self, path: str, seconds: float, size_bytes: int = 0, rank_bytes: int = 0) -> None:
        """`size_bytes` over all ranks; `rank_bytes` are the most that one rank moved through its link."""
        switches = self.switches.setdefault(path, Switches())
        switches.count += 1
        switches.seconds.append(seconds)
        switches.buckets.add(seconds)
        switches.bytes += size_bytes
        if rank_bytes and seconds > 0 and self.link_bytes_per_s:
            switches.link_share = rank_bytes / seconds / self.link_bytes_per_s

    def new_op_id(self) -> int:
        self.next_op += 1
        return self.next_op - 1

    def enter_device(self, rank: int, memory: DeviceMemory) -> None:
        """What a rank's device is and has. Contexts and what other processes hold count against the capacity."""
        most = self.most_foreign.get(rank, memory.foreign_bytes)
        memory = msgspec.structs.replace(memory, foreign_bytes=min(memory.foreign_bytes, most))
        self.device_memory[rank] = memory
        self.capacities = (*self.capacities[:rank], memory.capacity_bytes, *self.capacities[rank + 1 :])
        self.ledger.set_capacity(rank, memory.capacity_bytes)
        workspace = self.ledger.held(DEVICE, "workspace").get(rank, 0)
        lines = {"context": memory.context_bytes, "foreign": memory.intruding_bytes, "workspace": workspace}
        self.ledger.record(DEVICE, rank, {kind: size for kind, size in lines.items() if size})

    def enter_unaccounted(self, rank: int) -> None:
        """What a rank's device holds above all that groups are known to have (what its libraries keep for steps, graphs of parked
        models) is promised to nobody. Engines in processes of their own enter theirs themselves."""
        hosted = any(group.hosted for group in self.groups.values() if rank in group.ranks)
        if rank in self.device_memory and not hosted and not self.adopting:
            more = max(0, self.unaccounted_bytes(rank))
            lines = {kind: size for owner, kind, size in self.ledger.lines(rank) if owner == DEVICE and kind != "workspace"}
            self.ledger.record(DEVICE, rank, {**lines, "workspace": more} if more else lines)

    def tell_engines_apart(self, rank: int) -> None:
        """A rank that began beside engines of the pool took theirs for foreign memory: what groups hold there is none."""
        memory = self.device_memory[rank]
        here = [group for group in self.groups.values() if rank in group.held]
        if any(group.hosted for group in here):
            ours = {group.id for group in here}
            known = sum(size for owner, _, size in self.ledger.lines(rank) if owner in ours)
            self.most_foreign[rank] = max(0, memory.used_bytes - memory.context_bytes - memory.kept_bytes - known)
            self.enter_device(rank, memory)

    def unaccounted_bytes(self, rank: int) -> int:
        """By how much the device's own figure exceeds what the ledger and its owner know of. 0 where it has none."""
        memory = self.device_memory.get(rank)
        if memory is None:
            return 0
        groups = sum(size for owner, _, size in self.ledger.lines(rank) if owner != DEVICE)
        return memory.used_bytes - memory.foreign_bytes - memory.context_bytes - memory.kept_bytes - groups

    def check(self) -> None:
        """AssertionError when the parts disagree. Run by tests, and by the driver when it is idle."""
        self.ledger.check()
        owners = self.ledger.owners() - {DEVICE}
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
