"""The pool driver's decisions: events in, effects out, no clock, no I/O, no lock. One loop calls it (rules 1 and 2).

Every event ends in `_settle`: bring groups towards what is assigned, balance KV, send the steps that can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError
from workers.driver.constraining import Constraining
from workers.driver.effects import Effects, Ended, ModelFacts, RequestKey
from workers.driver.elastic import ElasticKv
from workers.driver.generations import kept
from workers.driver.group import Group, Wanted
from workers.driver.lifecycle import Lifecycle
from workers.driver.overdue import Overdue, Silent, is_given_up
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.residency import State
from workers.driver.sequence import Request, Sequence
from workers.driver.sizing import Placement
from workers.driver.stepping import Stepper
from workers.driver.streaming import Streams
from workers.engines.trtllm.messages import Output
from workers.messages import Constrained, DeviceMemory, Done, HeldShard, Progress, StepDone, UnloadShard

STALLED_S = 120.0
"""Requests in flight and no step for so long: something hangs in a device or a peer, and the ranks are restarted (rule 11)."""


HELD_RETRY_S = 5.0


class PoolCore:
    def __init__(self, device: str, capacities: Items[int], effects: Effects, first_sequence: int = 1) -> None:
        """`first_sequence`: above every sequence id that an earlier driver gave to ranks which may be adopted."""
        self.state = PoolState(device, tuple(capacities), first_sequence)
        self._effects = effects
        self._now = 0.0
        self._requests = Requests(self.state, effects, self._on_canary_end)
        self._kv = ElasticKv(self.state, effects)
        self._lifecycle = Lifecycle(self.state, effects, self._requests, self._kv)
        self._stepper = Stepper(self.state, effects, self._requests)
        self._streams = Streams(self.state, effects, self._requests)
        self._overdue = Overdue(self.state)
        self._constraining = Constraining(self.state, effects, self._requests)

    # ------------------------------------------------------------------ from gateways

    def on_submit(self, now: float, request: Request) -> None:
        self._requests.submit(now, request)
        self._settle(now)

    def on_cancel(self, now: float, key: RequestKey) -> None:
        self._requests.cancel(key)
        self._settle(now)

    def on_link_closed(self, now: float, link: int) -> None:
        self._requests.close_link(link)
        self._settle(now)

    # ------------------------------------------------------------------ from the controller

    def on_assign(self, now: float, fence: int, revision: int, wanted: Items[Wanted]) -> None:
        """The whole list. YardError(CONFLICT) when the fence is older than one seen."""
        if fence < self.state.fence:
            raise YardError(
                ErrorCode.CONFLICT,
                f"fence {fence} is older than {self.state.fence}: another controller has taken over; read the lease again",
            )
        for item in wanted:
            _check_placement(item, len(self.state.capacities))
        self.state.fence, self.state.revision = fence, revision
        self.state.wanted, self.state.assigned = list(wanted), True
        self._lifecycle.match(now)
        self._effects.changed()
        self._settle(now)

    def on_set_residency(self, now: float, fence: int, model: str, residency: str) -> str:
        """Begin to park, wake or unload a model; the state that it has now. `fence` 0: an operator, not a controller.

        YardError(NOT_FOUND, INVALID, CONFLICT).
        """
        if fence and fence < self.state.fence:
            raise YardError(ErrorCode.CONFLICT, f"fence {fence} is older than {self.state.fence}: read the lease again")
        self._lifecycle.switching.ask(now, model, residency)
        self._settle(now)
        return self._lifecycle.switching.described(model)

    def on_closing(self, now: float) -> None:
        """The driver is about to stop: finish what runs, take nothing new."""
        del now
        self.state.closing = True
        for model in list(self.state.held):
            self._requests.fail_held(model, "this pool's driver is stopping; another one follows", 1.0)
        self._effects.changed()

    # ------------------------------------------------------------------ from ranks

    def on_host_memory(self, now: float, capacities: Mapping[int, int]) -> None:
        """What the parked models of each rank may take of its host's memory. Without this event there is no limit."""
        del now
        self.state.standby_capacities = dict(capacities)

    def on_ranks_up(
        self, now: float, held: dict[int, tuple[HeldShard, ...]], devices: Mapping[int, DeviceMemory] = MappingProxyType({})
    ) -> None:
        """All ranks are connected; `held` by rank is what they kept of an earlier driver, empty when they are fresh.

        `devices`: of ranks that have one of their own; their capacity takes the place of the configured one.
        """
        self.state.ranks_up = True
        self.state.adopting = False
        self.state.message = ""
        self.state.most_foreign.clear()
        for rank, memory in devices.items():
            self.state.enter_device(rank, memory)
        shards: dict[int, dict[int, HeldShard]] = {}
        for rank, items in held.items():
            for item in items:
                shards.setdefault(item.group_id, {})[rank] = item
        for group_id, by_rank in sorted(shards.items()):
            self._adopt(now, group_id, by_rank)
        for rank in devices:
            self.state.tell_engines_apart(rank)
            self.state.enter_unaccounted(rank)
        self._lifecycle.match(now)
        self._effects.changed()
        self._settle(now)

    def on_nothing_adopted(self, now: float) -> None:
        """No ranks of an earlier driver live: new ones are being started."""
        self.state.adopting = False
        self._lifecycle.match(now)
        self._settle(now)

    def on_ranks_lost(self, now: float, reason: str) -> None:
        """One rank lost is all lost (rule 11): all requests end at once, groups begin again when ranks are back."""
        if self.state.ranks_up:
            self._lose_ranks(now, reason)

    def _lose_ranks(self, now: float, reason: str, given_up: Group | None = None) -> None:
        """`given_up` does not begin again."""
        self.state.ranks_up = False
        self.state.message = reason
        hosted = {group.id for group in self.state.groups.values() if group.hosted}
        keep = [group for group in self.state.groups.values() if kept(self.state, group)]
        replaced = {group.model for group in keep}
        self.state.ops = {op.id: op for op in self.state.ops.values() if op.group_id in hosted}
        for group in list(self.state.groups.values()):
            if group.hosted:
                continue  # its engine has processes of its own
            text = f"model `{group.model}`: {reason}; its worker group restarts"
            stood_by = group.state in ("parked", "cold")
            gave_up = group.state == "failed" and group.retry_at is None and group.model in replaced
            why = group.reason if gave_up or group is given_up else reason
            group.state = "failed"  # so that the canary's end decides nothing
            self._requests.fail_group(group, ErrorCode.UNAVAILABLE, text, self._requests.estimate_s(now, group))
            self.state.ledger.release(group.id)
            if (group.unwanted and group not in keep) or not self.state.assigned:
                del self.state.groups[group.id]
                continue
            self._renew(group, why, "failed" if gave_up or group is given_up else "cold" if stood_by else "waiting")
        for model in list(self.state.held):
            self._requests.fail_held(model, f"model `{model}`: {reason}; the pool's ranks restart", HELD_RETRY_S)
        self._effects.event("ranks_lost", "", reason)
        self._effects.restart_ranks(reason)
        self._effects.changed()

    def on_step_done(self, now: float, done: StepDone) -> None:
        self._now = now
        if done.damaged and (group := self.state.groups.get(done.group_id)):
            self._lifecycle.on_damaged(now, group, done.error)
        self._stepper.on_done(now, done)
        self._settle(now)

    def on_constrained(self, now: float, rank: int, report: Constrained) -> None:
        self._now = now
        self._constraining.on_constrained(now, rank, report)
        self._settle(now)

    # ------------------------------------------------------------------ from engines with processes of their own

    def on_engine_tokens(self, now: float, group_id: int, outputs: Items[Output]) -> None:
        """One iteration of the engine."""
        self._now = now
        self._streams.on_tokens(now, group_id, outputs)
        self._settle(now)

    def on_engine_lost(self, now: float, group_id: int, reason: str) -> None:
        self._now = now
        if group := self.state.groups.get(group_id):
            self._lifecycle.on_engine_lost(now, group, reason)
            self._settle(now)

    # ------------------------------------------------------------------ from both

    def on_progress(self, now: float, rank: int, progress: Progress) -> None:
        op = self.state.ops.get(progress.op)
        if op is not None:
            op.heard_at = now
            op.progress[rank] = progress.fraction
            group = self.state.groups[op.group_id]
            if group.state == "loading":
                group.reason = progress.what
            if progress.note:
                self._effects.event("weights", group.model, progress.note)

    def on_op_done(self, now: float, rank: int, done: Done) -> None:
        if done.memory is not None:
            self.state.enter_device(rank, done.memory)
            self.state.enter_unaccounted(rank)
        op = self.state.ops.get(done.op)
        if op is None:
            return  # of a group that was lost meanwhile
        group = self.state.groups[op.group_id]
        op.heard_at = now
        op.pending.discard(rank)
        op.progress[rank] = 1.0
        if done.error:
            op.errors[rank] = done.error
        elif done.held is not None:
            group.held[rank] = done.held
        if op.pending:
            return
        del self.state.ops[op.id]
        if group.op is not op:
            return  # growth that an unload has overtaken
        group.op = None
        if op.kind == "kv":
            self._kv.on_done(now, group, op)
        else:
            self._lifecycle.on_op_done(now, group, op)
        self._settle(now)

    # ------------------------------------------------------------------ from the driver's own slow work

    def on_inspected(self, now: float, group_id: int, facts: ModelFacts | str) -> None:
        """`facts`, or the reason why the checkpoint cannot be read."""
        if group := self.state.groups.get(group_id):
            self._lifecycle.on_inspected(now, group, facts)
            self._settle(now)

    def on_canary_prompt(self, now: float, group_id: int, prompt: tuple[int, ...] | str) -> None:
        """Token ids, or the reason why there are none."""
        if group := self.state.groups.get(group_id):
            self._lifecycle.on_canary_prompt(now, group, prompt)
            self._settle(now)

    def on_canary_judged(self, now: float, group_id: int, problem: str) -> None:
        """`problem` is empty when the answer is right."""
        if group := self.state.groups.get(group_id):
            self._lifecycle.on_canary_judged(now, group, problem)
            self._settle(now)

    def on_tick(self, now: float) -> None:
        """Called several times a second: deadlines, retries, idle memory, stalled steps."""
        self._now = now
        self._requests.expire(now)
        self._constraining.expire(now)
        if self._stepper.stalled_s(now) > STALLED_S:
            self.on_ranks_lost(now, f"requests in flight and no step for {STALLED_S:.0f} s")
            return
        if silent := self._overdue.look(now):
            self._on_silent(now, silent)
            return
        for group in self._streams.stalled(now, STALLED_S):
            self._effects.drop_engine(group.id)
        self._kv.give_back_idle(now)
        self._kv.come_down()
        self._lifecycle.switching.leave_idle(now)
        self._settle(now)

    # ------------------------------------------------------------------ inside

    def stalled_s(self, now: float) -> float:
        """For how long requests have been in flight without a step (rule 11)."""
        return self._stepper.stalled_s(now)

    def _settle(self, now: float) -> None:
        self._now = now
        self._lifecycle.reconcile(now)
        self._kv.give_back()
        self._constraining.pump(now)
        self._stepper.pump(now)
        self._streams.pump(now)
        self._kv.grow(now)

    def _on_silent(self, now: float, silent: Silent) -> None:
        """A rank executes nothing any more (rule 11)."""
        group = silent.group
        self._effects.event(f"{silent.op.kind}_failed", group.model, f"group {group.id}: {silent.reason}")
        self._lose_ranks(now, silent.reason, group if is_given_up(silent) else None)

    def _on_canary_end(self, group: Group, sequence: Sequence, ended: Ended) -> None:
        self._lifecycle.on_canary_end(self._now, group, sequence, ended)

    def _adopt(self, now: float, group_id: int, by_rank: dict[int, HeldShard]) -> None:
        """A group that all its ranks hold alike is checked and serves again, or stands by again; pieces are unloaded."""
        self.state.next_group = max(self.state.next_group, group_id + 1)
        any_shard = next(iter(by_rank.values()))
        placement = Placement(any_shard.ranks, any_shard.tensor_parallel, any_shard.pipeline_parallel)
        whole = set(by_rank) == set(any_shard.ranks) and len({(shard.kv_blocks, shard.parked) for shard in by_rank.values()}) == 1
        if not whole:
            for rank in sorted(by_rank):
                self._effects.send(rank, UnloadShard(op=self.state.new_op_id(), group_id=group_id))
            return
        wanted = Wanted(any_shard.model, 0, ModelSpec.model_validate_json(any_shard.spec_json), any_shard.spec_json, placement)
        # What is parked was checked before it was parked (rule 8).
        state: State = "parked" if any_shard.parked else "checking"
        group = Group(group_id, wanted, state=state, held=dict(by_rank), kv_blocks=any_shard.kv_blocks)
        group.load_began_at, group.inspecting, group.proven = now, True, any_shard.parked
        for rank, shard in by_rank.items():
            self.state.ledger.record(group_id, rank, {kind: size for kind, size in shard.bytes.items() if size})
        self.state.groups[group_id] = group
        self._effects.event("adopted", group.model, f"group {group_id} on {placement}")
        self._effects.inspect(group_id, group.model, group.spec)

    def _renew(self, group: Group, reason: str, state: State) -> None:
        """The same worker group, to be loaded anew under an id that no rank has seen; on request if it stood by."""
        fresh = Group(self.state.next_group, group.wanted, state=state, reason=reason, facts=group.facts, sizing=group.sizing)
        fresh.sized_by = group.sized_by
        fresh.used_at = group.used_at
        fresh.unwanted, fresh.proven, fresh.gives_way = group.unwanted, group.proven, group.gives_way
        fresh.attempts, fresh.damaged_at = group.attempts, group.damaged_at
        self.state.next_group += 1
        del self.state.groups[group.id]
        self.state.groups[fresh.id] = fresh


def _check_placement(wanted: Wanted, ranks: int) -> None:
    placement = wanted.placement
    size = placement.tensor_parallel * placement.pipeline_parallel
    if not len(placement.ranks) == len(set(placement.ranks)) == size:
        raise YardError(ErrorCode.INVALID, f"model `{wanted.model}`: {placement} does not name each of its ranks once")
    if any(rank >= ranks for rank in placement.ranks):
        raise YardError(ErrorCode.INVALID, f"model `{wanted.model}`: {placement}, but the pool has {ranks} ranks")
