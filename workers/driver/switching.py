"""Parks and wakes: what is in a pool's memory this second. Pure decisions; the states are in `residency`.

- Wanted: a group for which requests are held, that somebody asked for, or that its replicas need. See `room`; it is woken once
  however many ask (rule 6).
- Room: idle groups leave by least value per byte, never pinned ones, never one with requests in flight. When all that could
  leave is busy and requests have waited for a while, busy groups take turns: they take nothing new, end what they have, park.
  Who leaves is decided in `placement.parking`, which the simulator uses too.
- Idle: a group parks after its `idle_park_s`, and gives its standby copy up after its `idle_unload_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from gateway.api.errors import ErrorCode, YardError
from workers.driver.effects import Effects
from workers.driver.generations import comes, in_the_way, stands_in
from workers.driver.group import Group, Op
from workers.driver.group_memory import enter_measured, enter_parked, open_batcher, reserve_wake
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.residency import STANDING_BY, Event, State, Transition, decide
from workers.driver.room import asked, failed_to_park, fits_if_asked_for, going, situation, who_is_idle, who_leaves
from workers.memory.ledger import LedgerFull, Shortage
from workers.messages import ParkShard, WakeShard

PARK_AGAIN_AFTER_S = 30.0

Move = Callable[[Group, State, str], None]
Fail = Callable[[float, Group, str], None]
MakeRoom = Callable[[float, Group, LedgerFull], None]


class Switching:
    def __init__(
        self,
        state: PoolState,
        effects: Effects,
        requests: Requests,
        *,
        move: Move,
        fail: Fail,
        unload: Callable[[Group], None],
        make_room: MakeRoom,
    ) -> None:
        self._state = state
        self._effects = effects
        self._requests = requests
        self._move = move
        self._fail = fail
        self._unload = unload
        self._make_room = make_room

    # ------------------------------------------------------------------ what operators ask for

    def ask(self, now: float, model: str, residency: str) -> str:
        """Begin to bring a model to `resident`, `parked` or `cold`; the state that it has now. YardError says why not."""
        groups = self._served_by(model)
        if not groups:
            raise YardError(ErrorCode.NOT_FOUND, f"model `{model}` is not in this pool")
        if residency not in ("resident", "parked", "cold"):
            raise YardError(ErrorCode.INVALID, f"residency {residency!r} is none of resident, parked, cold", field="residency")
        refusals = [why for group in groups if (why := self._ask(now, group, residency))]
        if refusals:
            raise YardError(ErrorCode.CONFLICT, f"model `{model}` cannot become {residency}: {'; '.join(sorted(set(refusals)))}")
        return self.described(model)

    def described(self, model: str) -> str:
        """The states of its groups, and why they are no further."""
        groups = self._served_by(model)
        return ", ".join(
            sorted(
                {
                    f"{group.state} ({group.reason})" if group.state == "waiting" and group.reason else group.state
                    for group in groups
                }
            )
        )

    def _served_by(self, model: str) -> list[Group]:
        """Its old generation where that stands in for a new one."""
        groups = list(self._state.of_model(model))
        return [group for group in groups if stands_in(self._state, group)] or [group for group in groups if not group.unwanted]

    def _ask(self, now: float, group: Group, residency: str) -> str:
        if residency == "resident":
            group.wake_asked_at = now if group.state in ("waiting", *STANDING_BY) else None
            group.drop_asked = False
            if group.state == "failed":
                group.attempts, group.retry_at, group.damaged_at = 0, now, None
            return ""
        group.wake_asked_at = None
        if group.state in ("parking", "parked", "cold"):
            group.drop_asked = residency == "cold" and group.state != "cold"
            return ""
        group.drop_asked = False
        if why := self._park(group, "an operator asked for it"):
            return why
        group.drop_asked = residency == "cold"
        return ""

    # ------------------------------------------------------------------ parts of reconcile

    def wanted(self, group: Group) -> bool:
        """It stands by, and somebody waits for it."""
        return group.state in ("parked", "cold") and comes(self._state, group) and asked(self._state, group)

    def bring(self, now: float, group: Group) -> None:
        """Wake what is wanted, if the ledger has room on all its ranks (rule 3)."""
        if group.state == "cold":
            if group.op is None and not isinstance(decide("cold", "want", situation(self._state, group)), str):
                self._move(group, "waiting", "")
            return
        if group.sizing is None or group.op is not None or isinstance(self._decide(group, "wake"), str):
            return
        try:
            reserve_wake(self._state.ledger, group)
        except LedgerFull as full:
            self._make_room(now, group, full)
            return
        group.reclaiming = False
        self._wake(now, group, group.sizing.floor_blocks)

    def go_on(self, now: float, group: Group) -> None:
        """Park what is to be parked and has become quiet (rule 5); drop what is to be dropped."""
        if group.op is not None:
            return
        keeps_nothing = group.state == "parking" and any(held.park_unloads for held in group.held.values())
        if (group.drop_asked or keeps_nothing) and group.state in ("parking", "parked") and group.quiet:
            if not isinstance(self._decide(group, "drop"), str):
                self._drop(group)
        elif group.state == "parking" and group.quiet and group.batcher is not None:
            copies = {rank: self._copies_to_drop(rank, group) for rank in group.ranks}
            if lacking := self._host_memory_lacking(group, copies):
                self._effects.event("park_refused", group.model, f"group {group.id}: {lacking}; it is unloaded instead")
                self._drop(group)
                return
            released, group.batcher.released = tuple(group.batcher.released), []
            group.load_began_at = now
            group.reclaim_to = None
            op = self._op("park", group, 0)
            for rank in group.ranks:
                dropped = tuple(other.id for other in copies[rank])
                self._effects.send(rank, ParkShard(op=op.id, group_id=group.id, released=released, drop_copies=dropped))
                for other in copies[rank]:
                    other.held[rank] = msgspec.structs.replace(other.held[rank], standby_bytes=0)

    def leave_idle(self, now: float) -> None:
        """Now and then: what nobody has used for long."""
        for group in self._state.groups.values():
            spec, idle_s = group.spec, now - max(group.used_at, group.ready_since)
            if spec.idle_unload_s is not None and idle_s >= spec.idle_unload_s and not asked(self._state, group):
                if group.state == "parked" or (self._idle(now, group) and not self._park(group, "idle")):
                    group.drop_asked = True
            elif spec.idle_park_s is not None and idle_s >= spec.idle_park_s and self._idle(now, group):
                self._park(group, f"idle for {idle_s:.0f} s")

    def evict(self, now: float, wanting: Group, shortages: Iterable[Shortage]) -> str:
        """Park others for it. Empty when all that may leave would not do, else what is under way."""
        parking = going(self._state, wanting)
        chosen = who_leaves(self._state, now, wanting, shortages, parking)
        if chosen is None:
            return ""
        names = {group.model for group in parking}
        for group in chosen:
            self._leave(now, group, f"makes room for `{wanting.model}`")
            names.add(group.model)
        return f"{', '.join(sorted(names))} parked to make room" if names else ""

    def evict_idle(self, now: float, starving: Group, shortages: Iterable[Shortage]) -> None:
        """Park models that nobody has used for `TURN_S`, for the KV of requests that run."""
        for group in who_is_idle(self._state, now, starving, shortages, going(self._state, starving)):
            self._leave(now, group, f"leaves its memory to the KV of `{starving.model}`")

    def give_way(self, now: float, wanting: Group, shortages: Iterable[Shortage]) -> bool:
        """Its old generation leaves memory for it, and what else is needed; False when that would not do."""
        old = in_the_way(self._state, wanting)
        chosen = who_leaves(self._state, now, wanting, shortages, [*going(self._state, wanting), *old]) if old else None
        if chosen is None:
            return False
        for group in old:
            group.gives_way = True
            cannot_park = not all(held.parkable for held in group.held.values()) or failed_to_park(now, group)
            group.drop_asked = group.state == "parked" or cannot_park
        for group in (*old, *chosen):
            self._leave(now, group, f"makes room for `{wanting.model}` of generation {wanting.wanted.generation}")
        return True

    def come_back(self, now: float, group: Group) -> None:
        """What it gave way to has failed, or is not wanted any more."""
        group.wake_asked_at = now
        if group.state == "parked":
            group.drop_asked = False

    def stand_back(self, now: float, group: Group, shortages: Iterable[Shortage]) -> bool:
        """Nobody asks for it, and only what is worth more is in its way: it comes in once it is asked for."""
        moving = ("loading", "checking", "waking", "parking", "draining")
        beside = [other for other in self._state.groups.values() if not set(other.ranks).isdisjoint(group.ranks)]
        if any(other.state in moving for other in beside) or isinstance(self._decide(group, "stand_back"), str):
            return False
        if not fits_if_asked_for(self._state, now, group, shortages):
            return False
        self._move(group, "cold", "comes in when it is asked for: what is in memory has higher priority")
        return True

    # ------------------------------------------------------------------ events

    def on_done(self, now: float, group: Group, op: Op) -> None:
        if op.kind == "park":
            self._parked(now, group, op)
        else:
            self._woken(now, group, op)

    def _parked(self, now: float, group: Group, op: Op) -> None:
        if op.errors:
            group.park_retry_at = now + PARK_AGAIN_AFTER_S
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(op.errors.items()))
            self._effects.event("park_failed", group.model, f"group {group.id}: {text}")
            if any(held.parked for held in group.held.values()):
                self._wake(now, group, group.kv_blocks)  # its lines stand in the ledger still
                return
            self._move(group, "ready", "")
            self._requests.release_held(now, group.model)
            return
        before = sum(self._state.ledger.of_owner(group.id).values())
        enter_parked(self._state.ledger, group)
        freed = before - sum(self._state.ledger.of_owner(group.id).values())
        group.batcher, group.kv_blocks, group.grow_denied_at, group.idle_since = None, 0, None, None
        self._timed(now, group, "park", freed)
        self._move(group, "parked", "")

    def _woken(self, now: float, group: Group, op: Op) -> None:
        if op.errors:
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(op.errors.items()))
            self._fail(now, group, f"waking failed: {text}")
            return
        group.kv_blocks = op.blocks
        enter_measured(self._state.ledger, group)
        open_batcher(group, self._state.device)
        group.ready_since = now
        self._timed(now, group, "wake", sum(held.bytes.get("weights", 0) for held in group.held.values()))
        self._move(group, "ready", "")
        self._requests.release_held(now, group.model)

    def _timed(self, now: float, group: Group, path: str, size_bytes: int) -> None:
        seconds = now - group.load_began_at
        longest = max((held.standby_bytes or held.bytes.get("weights", 0) for held in group.held.values()), default=0)
        self._state.switched(path, seconds, abs(size_bytes), longest)
        if longest and seconds > 0:
            self._state.move_bytes_per_s[path] = longest / seconds
        what = "freed by the park" if path == "park" else "brought back by the wake"
        self._effects.event(
            path, group.model, f"group {group.id}: {size_bytes / 2**20:.1f} MiB {what} in {seconds * 1000:.0f} ms"
        )

    # ------------------------------------------------------------------ inside

    def _park(self, group: Group, reason: str) -> str:
        """Empty, or why not."""
        transition = self._decide(group, "park")
        if isinstance(transition, str):
            return transition
        self._move(group, transition.target, reason)
        self._requests.drop_shadows(group)
        return ""

    def _leave(self, now: float, group: Group, reason: str) -> None:
        self._park(group, reason)
        self.go_on(now, group)

    def _idle(self, now: float, group: Group) -> bool:
        """It serves, nobody waits for an answer of it, and no park of it failed a moment ago."""
        if failed_to_park(now, group):
            return False
        return group.state == "ready" and group.op is None and not group.wanted_by_somebody

    def _drop(self, group: Group) -> None:
        group.drop_asked = False
        self._move(group, "cold", "")
        self._unload(group)

    def _copies_to_drop(self, rank: int, group: Group) -> list[Group]:
        """Groups in memory of this rank that leave their copies' place to this one's; those used last first."""
        lacking = self._host_bytes_lacking(rank, group)
        others = [
            other
            for other in self._state.groups.values()
            if other is not group and other.state == "ready" and other.op is None and rank in other.held
        ]
        chosen: list[Group] = []
        for other in sorted(others, key=lambda other: -other.used_at):
            if lacking > 0 and other.held[rank].standby_bytes:
                lacking -= other.held[rank].standby_bytes
                chosen.append(other)
        return chosen if lacking <= 0 else []

    def _host_memory_lacking(self, group: Group, dropped: dict[int, list[Group]]) -> str:
        """Empty, or where its copy has no room, though these copies go."""
        for rank, held in sorted(group.held.items()):
            if self._host_bytes_lacking(rank, group) > sum(other.held[rank].standby_bytes for other in dropped[rank]):
                needed = held.bytes.get("weights", 0)
                return f"rank {rank} has no host memory for {needed / 2**20:.0f} MiB of weights"
        return ""

    def _host_bytes_lacking(self, rank: int, group: Group) -> int:
        """Beside the copies that are there and that are being made."""
        capacity = self._state.standby_capacities.get(rank)
        if capacity is None:
            return 0
        taken = 0
        for other in self._state.groups.values():
            if rank in other.held:
                parks = other is group or (other.op is not None and other.op.kind == "park")
                held = other.held[rank]
                taken += max(held.standby_bytes, held.bytes.get("weights", 0)) if parks else held.standby_bytes
        return taken - capacity

    def _wake(self, now: float, group: Group, blocks: int) -> None:
        group.load_began_at = now
        self._move(group, "waking", "")
        op = self._op("wake", group, blocks)
        for rank in group.ranks:
            self._effects.send(rank, WakeShard(op=op.id, group_id=group.id, kv_blocks=blocks))

    def _op(self, kind: str, group: Group, blocks: int) -> Op:
        op = Op(self._state.new_op_id(), kind, group.id, set(group.ranks), blocks)  # type: ignore[arg-type]
        group.op = self._state.ops[op.id] = op
        return op

    def _decide(self, group: Group, event: Event) -> Transition | str:
        return decide(group.state, event, situation(self._state, group))
