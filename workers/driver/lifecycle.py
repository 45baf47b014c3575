"""Brings the worker groups of a pool to what is assigned, one step at a time. Level-triggered and pure.

`reconcile` is the decision tree; everything that takes time comes back as an event and ends in another `reconcile`.
"""

from __future__ import annotations

from gateway.api.errors import ErrorCode, YardError
from workers.driver.effects import Effects, Ended, ModelFacts
from workers.driver.elastic import ElasticKv
from workers.driver.generations import comes, gave_way, kept, replacement_comes
from workers.driver.group import FIRST_BACKOFF_S, LAST_BACKOFF_S, MAX_ATTEMPTS, Group, Op
from workers.driver.group_memory import enter_measured, open_batcher
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.residency import COMING, STANDING_BY, State, allowed
from workers.driver.sequence import Sequence
from workers.driver.sizing import GroupSizing, size_group
from workers.driver.switching import Switching
from workers.memory.ledger import LedgerFull
from workers.messages import LoadShard, UnloadShard

CANARY_TIMEOUT_S = 120.0
DAMAGE_FORGOTTEN_S = 300.0
"""A model may answer its canary and still have weights that give no numbers for some prompt: such failures count as attempts
over a load that went well, until there was none for so long."""
_GOING = ("loading", "checking")


class Lifecycle:
    def __init__(self, state: PoolState, effects: Effects, requests: Requests, kv: ElasticKv) -> None:
        self._state = state
        self._effects = effects
        self._requests = requests
        self._kv = kv
        self.switching = Switching(
            state,
            effects,
            requests,
            move=self._to,
            fail=self._fail,
            unload=self._unload,
            make_room=self._make_room,
        )

    def match(self, now: float) -> None:
        """Find for every assigned group the one that is there, or begin a new one; mark the others unwanted."""
        if not self._state.assigned or self._state.adopting:
            return
        free = [group for group in self._state.groups.values() if group.state != "draining"]
        for wanted in self._state.wanted:
            group = next((group for group in free if group.matches(wanted)), None)
            if group is None:
                self._state.groups[self._state.next_group] = Group(self._state.next_group, wanted)
                self._state.next_group += 1
                continue
            free.remove(group)
            if group.wanted.generation != wanted.generation:  # somebody changed something
                group.damaged_at = None
                if group.state == "failed":
                    group.attempts, group.retry_at = 0, 0.0  # try again
            if group.unwanted and group.gives_way:
                self.switching.come_back(now, group)
            group.wanted, group.unwanted = wanted, False
        for group in free:
            group.unwanted = True

    def reconcile(self, now: float) -> None:
        """The decision tree, while ranks are up:

        1. What is not wanted and holds nothing goes; what serves drains once its replacement serves, at once if there is none.
           What served and has no replacement yet stays at hand: see `generations`.
        2. What drains and is quiet is unloaded (rule 5).
        3. What failed waits its backoff out, then tries again, a bounded number of times.
        4. What is to be parked or dropped and is quiet, is (rule 5).
        5. What somebody asks for goes before what nobody asks for, then by priority and name. What stands by is woken; what waits
           is loaded: facts, then sizes, then the ledger on all ranks (rule 3), then the load. One lifecycle operation a model,
           one load a rank. When the ledger is short: KV that nobody uses is called back; failing that, idle models are parked;
           failing that, KV above floors is called back by preemption; failing that, the old generation of the same model gives
           way; failing that, it waits with the reason, or stands back until it is asked for where only higher priority is in
           its way.
        6. Who serves and lacks KV that no other group can spare has models parked that have been idle for a while.
        """
        if not self._state.ranks_up:
            return
        for group in list(self._state.groups.values()):
            # 1.
            if group.unwanted and group.op is None:
                if group.state in ("waiting", "failed", "cold") and not kept(self._state, group):
                    del self._state.groups[group.id]
                    self._retry_newer(now, group)
                    self._effects.changed()
                    continue
                if group.state in ("checking", "ready", "parking", "parked") and not replacement_comes(self._state, group):
                    self._drain(group)
            # 2.
            if group.state == "draining" and group.quiet:
                self._unload(group)
            # 3.
            if group.state == "failed" and group.op is None and group.retry_at is not None and group.retry_at <= now:
                group.retry_at = None
                self._to(group, "waiting", "")
            # 4.
            self.switching.go_on(now, group)
        # 5.
        for group in [group for group in self._state.groups.values() if group.state == "cold" and self.switching.wanted(group)]:
            self.switching.bring(now, group)
        coming = [
            group
            for group in self._state.groups.values()
            if group.op is None and ((group.state == "waiting" and comes(self._state, group)) or self.switching.wanted(group))
        ]
        held = self._state.held
        for group in sorted(
            coming, key=lambda group: (not held.get(group.model), -group.spec.priority, group.model, group.ranks)
        ):
            if group.state == "waiting":
                self._advance(now, group)
            elif self.switching.wanted(group):
                self.switching.bring(now, group)
        for model in [model for model in self._state.held if not self._may_come(model)]:
            self._requests.release_held(now, model)
        # 6.
        for group in list(self._state.groups.values()):
            if group.starving:
                shortages, group.starving = group.starving, ()  # said anew when it still lacks them
                self.switching.evict_idle(now, group, shortages)

    # ------------------------------------------------------------------ events

    def on_inspected(self, now: float, group: Group, facts: ModelFacts | str) -> None:
        group.inspecting = False
        if isinstance(facts, str):
            self._fail(now, group, facts)
            return
        try:
            group.sizing, group.sized_by = self._size(group, facts, group.attempts), group.wanted.measured
        except YardError as error:
            self._fail(now, group, error.message)
            return
        group.facts = facts
        if group.state == "checking":  # adopted: it holds its shards already
            enter_measured(self._state.ledger, group)
            open_batcher(group, self._state.device)
            self._effects.prepare_canary(group.id, group.model, group.spec)

    def on_op_done(self, now: float, group: Group, op: Op) -> None:
        """All ranks reported the end of a load, an unload, a park or a wake."""
        if op.kind in ("park", "wake"):
            self.switching.on_done(now, group, op)
        elif op.kind == "unload":
            self._unloaded(now, group, op)
        elif op.errors:
            group.sizing = None  # to be sized anew, with more room
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(op.errors.items()))
            self._fail(now, group, f"loading failed: {text}")
        else:
            self._state.load_times_s[group.model] = now - group.load_began_at
            loaded = [held.bytes.get("weights", 0) for held in group.held.values()]
            self._state.switched("load", now - group.load_began_at, sum(loaded), max(loaded, default=0))
            assert group.sizing is not None
            group.kv_blocks = group.sizing.floor_blocks
            enter_measured(self._state.ledger, group)
            open_batcher(group, self._state.device)
            self._to(group, "checking", "")
            self._effects.prepare_canary(group.id, group.model, group.spec)

    def on_damaged(self, now: float, group: Group, reason: str) -> None:
        """Its weights give no numbers. Ranks are healthy and serve their other models; this one is loaded anew after a pause."""
        if group.state in ("checking", "ready", "parking", "draining"):
            if not self._damaged_lately(now, group):
                group.attempts = 0
            group.damaged_at = now
            self._fail(now, group, reason)

    def on_canary_prompt(self, now: float, group: Group, prompt: tuple[int, ...] | str) -> None:
        if group.state != "checking":
            return
        if isinstance(prompt, str):
            self._fail(now, group, f"the canary prompt cannot be tokenized: {prompt}")
            return
        self._requests.start_canary(now, group, prompt, CANARY_TIMEOUT_S)

    def on_canary_end(self, now: float, group: Group, sequence: Sequence, ended: Ended) -> None:
        if group.state != "checking":
            return
        if ended.finish_reason == "error":
            self._fail(now, group, f"the canary was not answered: {ended.error_message}")
            return
        answer = sequence.tokens[sequence.prompt_tokens :]
        answer = answer[:-1] if ended.finish_reason == "stop" else answer
        key = group.placement_key(self._state.device)
        self._effects.judge_canary(group.id, group.model, group.spec, key, answer)

    def on_canary_judged(self, now: float, group: Group, problem: str) -> None:
        if group.state != "checking":
            return
        if problem:
            self._fail(now, group, problem)
            return
        if not self._damaged_lately(now, group):
            group.attempts = 0
        group.ready_since = now
        self._to(group, "ready", "")
        self._requests.release_held(now, group.model)

    def on_engine_lost(self, now: float, group: Group, reason: str) -> None:
        """The processes of this group alone are gone, all of them: its requests end, it begins again as one (rule 11)."""
        if group.op is not None:
            if group.op.kind in ("load", "unload"):
                return  # which ends by itself, with the reason
            del self._state.ops[group.op.id]
            group.op = None
        if group.state in ("checking", "ready", "parking", "parked", "waking", "draining"):
            self._effects.event("engine_lost", group.model, f"group {group.id}: {reason}")
            self._fail(now, group, reason)

    # ------------------------------------------------------------------ parts of the tree

    def _damaged_lately(self, now: float, group: Group) -> bool:
        return group.damaged_at is not None and now - group.damaged_at < DAMAGE_FORGOTTEN_S

    def _retry_newer(self, now: float, old: Group) -> None:
        """What was not tried again for the sake of this one may be: it is no more."""
        for group in self._state.of_model(old.model):
            if old.proven and not group.unwanted and group.state == "failed" and group.attempts < MAX_ATTEMPTS:
                group.retry_at = now if group.retry_at is None else group.retry_at

    def _may_come(self, model: str) -> bool:
        return any(group.state in COMING and comes(self._state, group) for group in self._state.of_model(model))

    def _drain(self, group: Group) -> None:
        self._to(group, "draining", "")
        if group.canary is not None:
            self._requests.cancel(group.canary.request.key)

    def _advance(self, now: float, group: Group) -> None:
        if group.facts is None:
            if not group.inspecting:
                group.inspecting = True
                self._effects.inspect(group.id, group.model, group.spec)
            return
        if group.sizing is None or group.sized_by != group.wanted.measured:
            group.sizing, group.sized_by = self._size(group, group.facts, group.attempts), group.wanted.measured
        busy = [other for other in self._state.groups.values() if other.op is not None and other.op.kind != "kv"]
        if any(other.model == group.model for other in busy):
            return
        if any(other.op.kind == "load" and set(other.ranks) & set(group.ranks) for other in busy if other.op):
            return
        try:
            self._state.ledger.reserve(group.id, group.sizing.budget)
        except LedgerFull as full:
            if self._others_leave(now, group, full):
                return
            least = self._size(group, group.facts, 0)
            if least.budget != group.sizing.budget:  # there is no room for more than it was planned to take
                group.sizing = least
                self._advance(now, group)
                return
            self._wait_for_room(now, group, full)
            return
        group.reclaiming = False
        self._load(now, group)

    def _size(self, group: Group, facts: ModelFacts, failed_attempts: int) -> GroupSizing:
        """YardError when the model cannot be so."""
        wanted = group.wanted
        return size_group(group.model, group.spec, facts, wanted.placement, self._state.device, failed_attempts, wanted.measured)

    def _make_room(self, now: float, group: Group, full: LedgerFull) -> None:
        if not self._others_leave(now, group, full):
            self._wait_for_room(now, group, full)

    def _others_leave(self, now: float, group: Group, full: LedgerFull) -> bool:
        shortages = "; ".join(map(str, full.shortages))
        parking = any(other.state == "parking" and set(other.ranks) & set(group.ranks) for other in self._state.groups.values())
        called_back = f"KV memory of other models is called back ({shortages})"
        if not parking and self._kv.reclaim_for_load(full.shortages, used=False):
            leaving = called_back
        elif evicted := self.switching.evict(now, group, full.shortages):
            leaving = f"{evicted} ({shortages})"
        elif not parking and self._kv.reclaim_for_load(full.shortages, used=True):
            leaving = called_back
        else:
            return False
        group.reclaiming = True
        self._to(group, group.state, leaving)
        return True

    def _wait_for_room(self, now: float, group: Group, full: LedgerFull) -> None:
        shortages = "; ".join(map(str, full.shortages))
        text = f"memory: {shortages}; unload a model of this pool, lower kv.floor, or raise the pool's memory"
        group.reclaiming = self.switching.give_way(now, group, full.shortages)
        if group.reclaiming:
            self._to(group, group.state, f"the old generation makes room ({shortages})")
        elif group.state == "waiting" and gave_way(self._state, group):
            self._fail(now, group, text)
        elif not self.switching.stand_back(now, group, full.shortages):
            self._to(group, group.state, text)

    def _load(self, now: float, group: Group) -> None:
        assert group.sizing is not None
        op = Op(self._state.new_op_id(), "load", group.id, set(group.ranks))
        group.op = self._state.ops[op.id] = op
        group.load_began_at = now
        self._to(group, "loading", "")
        placement, sizing = group.wanted.placement, group.sizing
        for rank in group.ranks:
            self._effects.send(
                rank,
                LoadShard(
                    op=op.id,
                    group_id=group.id,
                    model=group.model,
                    spec_json=group.wanted.spec_json,
                    ranks=placement.ranks,
                    tensor_parallel=placement.tensor_parallel,
                    pipeline_parallel=placement.pipeline_parallel,
                    kv_block_tokens=sizing.block_tokens,
                    kv_floor_blocks=sizing.floor_blocks,
                    kv_ceiling_blocks=sizing.ceiling_blocks,
                    budget=sizing.budget[rank],
                ),
            )

    def _unload(self, group: Group) -> None:
        op = Op(self._state.new_op_id(), "unload", group.id, set(group.ranks))
        group.op = self._state.ops[op.id] = op
        for rank in group.ranks:
            self._effects.send(rank, UnloadShard(op=op.id, group_id=group.id))

    def _unloaded(self, now: float, group: Group, op: Op) -> None:
        if op.errors:
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(op.errors.items()))
            self._effects.event("unload_failed", group.model, f"group {group.id}: {text}")
        self._state.ledger.release(group.id)
        group.batcher, group.kv_blocks, group.held, group.reclaim_to = None, 0, {}, None
        if group.state == "draining":
            del self._state.groups[group.id]
            self._effects.event("unloaded", group.model, f"group {group.id} on {group.wanted.placement} is gone")
            if any(other.reclaiming for other in self._state.groups.values()):
                self.reconcile(now)
        self._effects.changed()

    def _fail(self, now: float, group: Group, reason: str) -> None:
        """Give everything back, on all ranks; try again later while attempts are left."""
        held = group.id in self._state.ledger.owners()
        group.attempts += 1
        backoff = min(FIRST_BACKOFF_S * 2 ** (group.attempts - 1), LAST_BACKOFF_S)
        old = gave_way(self._state, group)
        again = group.attempts < MAX_ATTEMPTS and not old
        group.retry_at = now + backoff if again else None
        tail = f"attempt {group.attempts} of {MAX_ATTEMPTS}" + (f", next in {backoff:.0f} s" if again else "")
        if old:
            tail += f"; generation {old[0].wanted.generation} serves on, there is no room for both; change the model to try again"
        elif not again:
            tail += f"; `yard wake {group.model}` or a change of the model tries again"
        self._to(group, "failed", f"{reason} ({tail})")
        group.reclaiming = False
        self._requests.fail_group(group, ErrorCode.UNAVAILABLE, f"model `{group.model}`: {reason}", backoff)
        if held:
            self._unload(group)
        for other in old:
            self.switching.come_back(now, other)
        if not any(other.state in ("ready", *_GOING, *STANDING_BY) for other in self._state.of_model(group.model)):
            self._requests.fail_held(group.model, f"model `{group.model}`: {reason}", backoff)

    def _to(self, group: Group, state: State, reason: str) -> None:
        assert allowed(group.state, state), f"group {group.name} cannot go from {group.state} to {state}"
        if (group.state, group.reason) == (state, reason):
            return
        if group.state != state:
            self._effects.event(
                state, group.model, f"group {group.id} on {group.wanted.placement}" + (f": {reason}" if reason else "")
            )
        if state in ("ready", "failed"):
            group.wake_asked_at, group.gives_way = None, False
            group.proven = group.proven or state == "ready"
        group.state, group.reason = state, reason
        self._effects.changed()
