"""From the gateway's submit to the last thing said about a request. Pure decisions; see `submit` for the tree."""

from __future__ import annotations

from collections.abc import Callable

from gateway.api.errors import ErrorCode, invalid
from workers.driver import estimates
from workers.driver.effects import OWN_LINK, Effects, Ended, RequestKey
from workers.driver.generations import comes
from workers.driver.group import Group
from workers.driver.pool_state import Held, PoolState, Totals
from workers.driver.residency import COMING, STANDING_BY
from workers.driver.sequence import Request, Sequence
from workers.messages import SampledToken

MAX_RETRY_AFTER_S = 30.0
LONGEST_HOLD_S = 600.0
"""Who waits so long for a model to come in is told to come again: it may never come."""


class Requests:
    def __init__(self, state: PoolState, effects: Effects, on_canary_end: Callable[[Group, Sequence, Ended], None]) -> None:
        self._state = state
        self._effects = effects
        self._on_canary_end = on_canary_end

    def submit(self, now: float, request: Request) -> None:
        """The decision tree:

        0. A driver that stops takes nothing new.
        1. A deadline that has passed ends it here (rule 10). While ranks are down nothing is held: nobody knows when they
           are back, and another pool may have the model (rule 11).
        2. A model that is not in this pool: UNAVAILABLE, another pool may have it.
        3. A ready group takes it, the one with the fewest outstanding tokens, if its queue has room: else EXHAUSTED.
        4. A model on its way, or standing by: held, with an estimated wait, bounded like a queue; refused at once when the
           deadline is shorter than the estimate (rule 6). Either wakes it: who was told when to come again is served then.
        5. A model that failed or drains: UNAVAILABLE with the reason.
        """
        if request.key in self._state.sequences:
            raise invalid(f"request id {request.key[1]} is in use in this stream", field="id")
        arrival = self._next_arrival()
        # 0.
        if self._state.closing:
            self._refuse(request, ErrorCode.UNAVAILABLE, "this pool's driver is stopping; another one follows", 1.0)
            return
        # 1.
        if request.deadline is not None and request.deadline <= now:
            self._refuse(request, ErrorCode.DEADLINE, f"model `{request.model}`: the deadline passed before it was queued")
            return
        groups = list(self._state.of_model(request.model))
        if not self._state.ranks_up and not any(group.hosted for group in groups):
            reason = self._state.message or "they start"
            wait = min((self.estimate_s(now, group) for group in groups), default=1.0)
            self._refuse(request, ErrorCode.UNAVAILABLE, f"this pool's ranks are down: {reason}", wait)
            return
        # 2.
        if not groups:
            self._refuse(request, ErrorCode.UNAVAILABLE, f"model `{request.model}` is not in this pool", 1.0)
            return
        # 3.
        ready = [group for group in groups if group.state == "ready" and not group.unwanted]
        ready = ready or [group for group in groups if group.state == "ready"]
        if ready:
            self._enqueue(now, request, arrival, min(ready, key=lambda group: (group.outstanding_tokens, group.id)))
            return
        # 4.
        coming = [group for group in groups if group.state in COMING and comes(self._state, group)]
        if coming:
            self._hold(now, request, arrival, coming)
            return
        # 5.
        reasons = "; ".join(f"{group.state}: {group.reason}" if group.reason else group.state for group in groups)
        retry_at = [group.retry_at for group in groups if group.retry_at is not None]
        wait = min(max(min(retry_at) - now, 1.0), MAX_RETRY_AFTER_S) if retry_at else MAX_RETRY_AFTER_S
        self._refuse(request, ErrorCode.UNAVAILABLE, f"model `{request.model}` cannot serve ({reasons})", wait)

    def start_canary(self, now: float, group: Group, prompt: tuple[int, ...], timeout_s: float) -> None:
        """The driver's own request, straight to its group."""
        key = (OWN_LINK, group.id)
        request = Request(key, group.model, prompt, group.spec.canary.max_tokens, deadline=now + timeout_s, priority=100)
        group.canary = self._enter(now, request, self._next_arrival(), group)

    def cancel(self, key: RequestKey) -> None:
        """Takes effect with the next step; unknown requests have ended already."""
        if key in self._state.sequences:
            self.finish(key, "cancelled")
            return
        for model, waiting in self._state.held.items():
            for held in waiting:
                if held.request.key == key:
                    self._state.held[model].remove(held)
                    self._effects.end(key, Ended("cancelled", prompt_tokens=len(held.request.prompt)))
                    return

    def close_link(self, link: int) -> None:
        """The stream is gone, and with it everybody who asked over it."""
        for key in [key for key in self._state.sequences if key[0] == link]:
            self.cancel(key)
        for waiting in self._state.held.values():
            for held in [held for held in waiting if held.request.key[0] == link]:
                self.cancel(held.request.key)

    def expire(self, now: float) -> None:
        for key, (_, sequence) in list(self._state.sequences.items()):
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= now:
                self.finish(key, "error", ErrorCode.DEADLINE, f"model `{sequence.request.model}`: the deadline passed")
        for waiting in self._state.held.values():
            for held in [held for held in waiting if held.request.deadline is not None and held.request.deadline <= now]:
                waiting.remove(held)
                text = f"model `{held.request.model}`: the deadline passed while it was loading"
                self._refuse(held.request, ErrorCode.DEADLINE, text)
            for held in [held for held in waiting if now - held.since >= LONGEST_HOLD_S]:
                waiting.remove(held)
                text = f"model `{held.request.model}` did not come in within {LONGEST_HOLD_S:.0f} s"
                self._refuse(held.request, ErrorCode.UNAVAILABLE, text, MAX_RETRY_AFTER_S)

    def release_held(self, now: float, model: str) -> None:
        """The model became ready, or will not: submit again what waited for it, in order."""
        waiting = self._state.held.pop(model, [])
        for held in sorted(waiting, key=lambda held: held.arrival):
            self.submit(now, held.request)

    def token(self, now: float, group: Group, sequence: Sequence, token: SampledToken) -> None:
        """A sampled token, already appended: emit it, or end with it or with what was wrong."""
        del now
        key = sequence.request.key
        if token.error:
            self.finish(key, "error", ErrorCode.INVALID, f"model `{group.model}`: {token.error}", field="json_schema")
            return
        if token.token in sequence.stop_ids:
            self.finish(key, "stop", stop_token_id=token.token)
            return
        if sequence is not group.canary:
            self._effects.emit(key, token)
        if len(sequence.tokens) >= sequence.max_length:
            self.finish(key, "length")

    def finish(
        self,
        key: RequestKey,
        finish_reason: str,
        code: ErrorCode | None = None,
        message: str = "",
        *,
        stop_token_id: int = -1,
        retry_after_s: float = 0.0,
        field: str = "",
    ) -> None:
        group, sequence = self._state.sequences.pop(key)
        assert group.batcher is not None
        group.batcher.remove(sequence)
        ended = Ended(
            finish_reason,
            stop_token_id,
            code,
            message,
            retry_after_s,
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=sequence.generated,
            cached_tokens=sequence.cached_tokens,
            error_field=field,
        )
        if _counts(sequence.request):
            group.used_at = max(group.used_at, group.progress_at)
        if key[0] != OWN_LINK:
            totals = self._state.totals.setdefault(group.model, Totals())
            totals.prompt_tokens += ended.prompt_tokens
            totals.cached_tokens += ended.cached_tokens
            totals.completion_tokens += ended.completion_tokens
            totals.failed += finish_reason == "error"
        if sequence is group.canary:
            group.canary = None
            self._on_canary_end(group, sequence, ended)
        else:
            self._effects.end(key, ended)

    def fail_group(self, group: Group, code: ErrorCode, message: str, retry_after_s: float) -> None:
        """End all requests of a group, its canary too."""
        for key in [key for key, (owner, _) in self._state.sequences.items() if owner is group]:
            self.finish(key, "error", code, message, retry_after_s=retry_after_s)

    def drop_shadows(self, group: Group) -> None:
        """Copies that nobody waits for end, so that they keep nothing in memory."""
        for key in [
            key for key, (owner, sequence) in self._state.sequences.items() if owner is group and sequence.request.shadow
        ]:
            self.finish(key, "error", ErrorCode.UNAVAILABLE, f"model `{group.model}` leaves memory", retry_after_s=1.0)

    def fail_held(self, model: str, message: str, retry_after_s: float) -> None:
        for held in self._state.held.pop(model, []):
            self._refuse(held.request, ErrorCode.UNAVAILABLE, message, retry_after_s)

    def estimate_s(self, now: float, group: Group) -> float:
        """Until the group is ready."""
        return estimates.estimate_s(self._state, now, group)

    # ------------------------------------------------------------------ parts of submit

    def _hold(self, now: float, request: Request, arrival: int, coming: list[Group]) -> None:
        if request.shadow:
            self._refuse(
                request, ErrorCode.UNAVAILABLE, f"model `{request.model}` is not in memory, and a copy brings nothing in"
            )
            return
        waiting = self._state.held.setdefault(request.model, [])
        wait = min(self.estimate_s(now, group) for group in coming)
        state = min(coming, key=lambda group: self.estimate_s(now, group))
        reason = f"model `{request.model}` is {state.state}" + (f" ({state.reason})" if state.reason else "")
        if len(waiting) >= max(state.spec.limits.queue, 1):
            self._refuse(request, ErrorCode.EXHAUSTED, f"{reason} and {len(waiting)} requests wait for it already", wait)
            return
        if request.deadline is not None and now + wait > request.deadline:
            text = f"{reason}, ready in about {wait:.1f} s; the deadline is in {request.deadline - now:.1f} s"
            self._refuse(request, ErrorCode.UNAVAILABLE, text, wait)
            if state.state in ("waiting", *STANDING_BY) and state.wake_asked_at is None:
                state.wake_asked_at = now
            return
        waiting.append(Held(request, arrival, now))
        self._effects.hold(request.key, reason, wait)

    def _enqueue(self, now: float, request: Request, arrival: int, group: Group) -> None:
        assert group.batcher is not None
        assert group.sizing is not None
        assert group.facts is not None
        problem = _problem(request, group)
        if problem:
            self._refuse(request, ErrorCode.INVALID, f"model `{group.model}`: {problem}")
            return
        limits = group.spec.limits
        if group.waiting >= limits.queue and group.running + group.waiting >= limits.concurrency:
            waits = [estimates.coming_in_s(self._state, now, other) for other in self._state.of_model(group.model)]
            if group.tokens_per_s:
                waits.append(group.outstanding_tokens / group.tokens_per_s / max(limits.concurrency, 1))
            wait = min((wait for wait in waits if wait is not None), default=1.0)
            wait = min(max(wait, 0.5), MAX_RETRY_AFTER_S)
            text = f"model `{group.model}`: {group.waiting} requests wait already, its limits.queue is {limits.queue}"
            self._refuse(request, ErrorCode.EXHAUSTED, text, wait)
            return
        self._enter(now, request, arrival, group)

    def _enter(self, now: float, request: Request, arrival: int, group: Group) -> Sequence:
        assert group.batcher is not None
        assert group.sizing is not None
        assert group.facts is not None
        room = longest(group)
        eos = frozenset() if request.ignore_eos else frozenset(group.facts.eos_ids)
        sequence = Sequence(
            id=self._state.next_sequence,
            request=request,
            arrival=arrival,
            tokens=list(request.prompt),
            max_length=min(len(request.prompt) + request.max_tokens, room) if request.max_tokens else room,
            stop_ids=request.stop_token_ids | eos,
            since=now,
        )
        self._state.next_sequence += 1
        if not group.batcher.busy and not group.steps:
            group.progress_at = now
        if _counts(request):
            group.used_at = now
        self._state.sequences[request.key] = (group, sequence)
        group.batcher.add(sequence)
        return sequence

    def _refuse(self, request: Request, code: ErrorCode, message: str, retry_after_s: float = 0.0) -> None:
        self._effects.end(
            request.key,
            Ended("error", -1, code, message, retry_after_s, prompt_tokens=len(request.prompt)),
        )

    def _next_arrival(self) -> int:
        self._state.next_arrival += 1
        return self._state.next_arrival


def longest(group: Group) -> int:
    """Tokens of the longest sequence that the group can hold: by its context, and by the most KV it may have."""
    assert group.sizing is not None
    return min(group.sizing.context, group.sizing.ceiling_blocks * group.sizing.block_tokens)


def _counts(request: Request) -> bool:
    """Whether it says that the model is used: neither canaries nor copies that nobody waits for do."""
    return request.key[0] != OWN_LINK and not request.shadow


def _problem(request: Request, group: Group) -> str:
    assert group.facts is not None
    vocabulary = group.facts.shape.vocabulary
    if not request.prompt:
        return "the prompt has no tokens"
    if request.sampling.json_schema and group.hosted:
        return "its engine cannot hold answers to a JSON schema"
    if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        return f"prompt token {max(request.prompt)} is outside its vocabulary of {vocabulary}"
    if len(request.prompt) >= longest(group):
        return f"the prompt has {len(request.prompt)} tokens, at most {longest(group) - 1} fit beside one token of answer"
    return ""
