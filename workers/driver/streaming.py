"""Groups whose engine schedules itself: requests go to it one by one, tokens come back an iteration at a time. Pure decisions.

The queue in front of the engine stays ours, so order, deadlines and cancels are the same as for groups that we batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.api.errors import ErrorCode
from workers.driver.effects import Effects
from workers.driver.group import Group
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.sequence import Sequence
from workers.driver.stream_batcher import StreamBatcher
from workers.engines.trtllm.messages import Cancel, Generate, Output
from workers.messages import SampledToken

_SPEED_WEIGHT = 0.1  # of the newest iteration in the moving average


class Streams:
    def __init__(self, state: PoolState, effects: Effects, requests: Requests) -> None:
        self._state = state
        self._effects = effects
        self._requests = requests

    def pump(self, now: float) -> None:
        """Cancels first: they make room."""
        for group, batcher in self._groups():
            if cancels := batcher.cancels():
                self._effects.to_engine(group.id, Cancel(cancels))
            self._expire_queue(now, batcher)
            batcher.order(now)
            for sequence in batcher.admit():
                self._effects.to_engine(group.id, _generate(sequence))

    def on_tokens(self, now: float, group_id: int, outputs: Iterable[Output]) -> None:
        group = self._state.groups.get(group_id)
        if group is None or not isinstance(group.batcher, StreamBatcher):
            return  # of a group that was lost meanwhile
        count = sum(self._on_output(now, group, group.batcher, output) for output in outputs)
        elapsed = max(now - group.progress_at, 1e-6)
        self._state.steps_done += 1
        self._state.last_step_at = group.progress_at = now
        group.tokens_per_s += _SPEED_WEIGHT * (count / elapsed - group.tokens_per_s)

    def stalled(self, now: float, limit_s: float) -> list[Group]:
        """Requests in flight and no token for so long (rule 11)."""
        return [group for group, batcher in self._groups() if batcher.busy and now - group.progress_at > limit_s]

    def _on_output(self, now: float, group: Group, batcher: StreamBatcher, output: Output) -> int:
        sequence = batcher.find(output.sequence)
        if output.finish:
            batcher.ended(output.sequence)
        if sequence is None:
            return 0
        if output.finish:
            sequence.known_to_ranks = False  # nothing is left to be cancelled
        for index, token in enumerate(output.tokens):
            sequence.tokens.append(token)
            sequence.computed = len(sequence.tokens)
            self._requests.token(now, group, sequence, _sampled(sequence, output, index))
            if sequence.ended:
                return len(output.tokens)
        if output.finish:
            self._end(group, sequence, output)
        return len(output.tokens)

    def _end(self, group: Group, sequence: Sequence, output: Output) -> None:
        """The engine found the end, and not by a token that was emitted."""
        key = sequence.request.key
        match output.finish:
            case "stop":
                stop = next(iter(sequence.stop_ids)) if len(sequence.stop_ids) == 1 else -1
                self._requests.finish(key, "stop", stop_token_id=stop)
            case "length":
                self._requests.finish(key, "length")
            case "timeout":
                self._requests.finish(key, "error", ErrorCode.DEADLINE, f"model `{group.model}`: the engine gave it up in time")
            case _:
                text = f"model `{group.model}`: the engine ended the request: {output.error or output.finish}"
                self._requests.finish(key, "error", ErrorCode.INTERNAL, text)

    def _expire_queue(self, now: float, batcher: StreamBatcher) -> None:
        """Rule 10: who waited too long does not reach the engine."""
        for sequence in list(batcher.waiting):
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= now:
                text = f"model `{sequence.request.model}`: the deadline passed in the queue"
                self._requests.finish(sequence.request.key, "error", ErrorCode.DEADLINE, text)

    def _groups(self) -> list[tuple[Group, StreamBatcher]]:
        found = self._state.groups.values()
        return [(group, group.batcher) for group in found if isinstance(group.batcher, StreamBatcher)]


def _sampled(sequence: Sequence, output: Output, index: int) -> SampledToken:
    wanted = sequence.request.sampling.logprobs
    likeliest = output.alternatives[index][:wanted] if wanted > 0 and index < len(output.alternatives) else []
    return SampledToken(
        sequence.id,
        output.tokens[index],
        output.logprobs[index] if index < len(output.logprobs) else 0.0,
        tuple(token for token, _ in likeliest),
        tuple(logprob for _, logprob in likeliest),
    )


def _generate(sequence: Sequence) -> Generate:
    request, sampling = sequence.request, sequence.request.sampling
    stops = sorted(sequence.stop_ids)
    return Generate(
        sequence=sequence.id,
        prompt=list(request.prompt),
        max_tokens=sequence.max_length - len(request.prompt),
        stop_token_ids=stops,
        end_id=stops[0] if stops else -1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
    )
