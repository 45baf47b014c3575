"""One worker group of a simulation: in-flight batching with chunked prefill as a flow, not step by step.

All running sequences get a token each step, so one counter of steps stands for all of them: a sequence ends when the counter
has grown by its output tokens. Between two events the step takes the same time, so the counter grows evenly. A prompt that
is being computed takes what the step's token budget leaves beside the decodes, one prompt after the other.

Groups that are busy on one device have its time in equal parts over time, step by step in turns. The flow knows that as half
the pace; a prompt's own step, once begun, runs whole, and waits for one step of each of the others before it.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from placement.speed import Speed

NEVER = float("inf")


class Job:
    """One request on its way. Times are those of the simulation."""

    __slots__ = ("arrived_s", "began_s", "ends_at_step", "first_s", "group", "kv_tokens", "late_s", "model", "output", "prompt")

    def __init__(self, arrived_s: float, model: int, prompt: int, output: int) -> None:
        self.arrived_s = arrived_s
        self.model = model
        self.prompt = prompt
        self.output = output
        self.first_s = 0.0
        self.began_s = 0.0  # it left the queue of its group
        self.late_s = 0.0  # it comes while a step runs, and waits half of it on average: all its tokens are so much later
        self.ends_at_step = 0.0
        self.kv_tokens = prompt + output
        self.group: SimulatedGroup | None = None


class SimulatedGroup:
    __slots__ = (
        "_chunk",
        "_head_left",
        "_now",
        "_order",
        "_prompt_tokens",
        "_rate",
        "_running",
        "_stages",
        "_step_s",
        "_steps",
        "base_s",
        "batch_tokens",
        "beside",
        "busy_s",
        "concurrency",
        "index",
        "inside",
        "kv_limit",
        "kv_tokens",
        "model",
        "outstanding",
        "places",
        "prefilling",
        "prompt_token_s",
        "ready_s",
        "sequence_s",
        "share",
        "state",
        "tokens",
        "used_s",
        "version",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, index: int, model: int, places: tuple[int, ...], speed: Speed, concurrency: int, batch_tokens: int, kv_limit: int
    ) -> None:
        """`places`: indices of its devices. `kv_limit`: tokens that its keys and values have room for."""
        self.index = index
        self.model = model
        self.places = places
        self.base_s = speed.base_s
        self.sequence_s = speed.sequence_s
        self.prompt_token_s = speed.prompt_token_s
        self._stages = speed.stages
        self.concurrency = concurrency
        self.batch_tokens = max(batch_tokens, concurrency + 1)
        self.kv_limit = kv_limit
        self.kv_tokens = 0
        self.state = "ready"  # as residency has it: ready, parking, parked, waking
        self.share = 1.0  # of its devices' time
        self.beside: tuple[SimulatedGroup, ...] = ()  # groups that share a device with it
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        self._steps = 0.0
        self._now = 0.0
        self._step_s = 0.0
        self._rate = 0.0  # steps a second
        self._chunk = 0.0  # prompt tokens a step
        self._head_left = 0.0  # of the first of `prefilling`
        self._prompt_tokens = 0  # of all of them, roughly
        self._order = 0
        self.inside = 0  # jobs in it
        self.outstanding = 0  # their tokens
        self.used_s = 0.0
        self.ready_s = 0.0
        self.busy_s = 0.0
        self.tokens = 0
        self.version = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self.prefilling)

    def advance(self, now: float) -> None:
        """Let the flow go on until now."""
        passed = now - self._now
        if passed > 0.0:
            if self._rate:
                self._steps += passed * self._rate
                self.busy_s += passed * self.share
                if self.prefilling:
                    self._head_left -= passed * self._rate * self._chunk
            self._now = now

    def add(self, job: Job) -> None:
        self.inside += 1
        self.outstanding += job.kv_tokens
        job.group = self
        self.waiting.append(job)

    def rest_s(self) -> float:
        """What is left, on average, of the step that runs on its devices. Its own one with a prompt in it is not counted: those
        are computed one after the other, and the flow knows of it."""
        own = self._step_s if self.busy else 0.0
        cycle, squares = own, 0.0 if self.prefilling else own * own
        for other in self.beside:
            if other.busy:
                cycle += other._step_s
                squares += other._step_s**2
        return squares / (2 * cycle) if cycle else 0.0

    def _early_s(self) -> float:
        """By how much the flow is behind a step that has just ended: it ran whole, after one of each that is busy beside it."""
        behind = self._step_s / self.share - self._step_s
        if behind <= 0.0:
            return 0.0
        return max(behind - sum(other._step_s for other in self.beside if other.busy), 0.0)

    def admit(self) -> None:
        """Of those that wait, as many as its limits let in."""
        waiting = self.waiting
        while (
            waiting
            and len(self._running) + len(self.prefilling) < self.concurrency
            and (self.kv_tokens + waiting[0].kv_tokens <= self.kv_limit or not self.kv_tokens)
        ):
            job = waiting.popleft()
            job.began_s = self._now
            self.kv_tokens += job.kv_tokens
            if not self.prefilling:
                self._head_left = job.prompt
            self.prefilling.append(job)
            self._prompt_tokens += job.prompt

    def next_s(self) -> float:
        """When the next of its jobs gets its first token or ends. Sets the pace until then."""
        decodes = len(self._running)
        if self.prefilling:
            self._chunk = min(self.batch_tokens - decodes, self._prompt_tokens)
            step_s = self.base_s + self._chunk * self.prompt_token_s
        elif decodes:
            step_s = self.base_s
        else:
            self._rate = 0.0
            return NEVER
        if decodes:
            step_s += max(decodes / self._stages, 1.0) * self.sequence_s
        self._step_s = step_s
        rate = self._rate = self.share / step_s
        first = self._head_left / (self._chunk * rate) if self.prefilling else NEVER
        end = (self._running[0][0] - self._steps) / rate if decodes else NEVER
        return self._now + max(min(first, end), 0.0)

    def settle(self, now: float) -> list[Job]:
        """Called when `next_s` has come, after `advance`: the jobs that ended. Others move on from prompt to output."""
        ended: list[Job] = []
        while self.prefilling and self._head_left <= 1e-6:
            job = self.prefilling.popleft()
            self._prompt_tokens -= job.prompt
            job.first_s = min(now, max(now - self._early_s(), job.began_s + self._step_s))
            if self.prefilling:
                self._head_left += self.prefilling[0].prompt
            if job.output <= 1:
                ended.append(job)
                continue
            job.ends_at_step = self._steps + job.output - 1
            self._order += 1
            heappush(self._running, (job.ends_at_step, self._order, job))
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            ended.append(heappop(self._running)[2])
        for job in ended:
            self.inside -= 1
            self.outstanding -= job.kv_tokens
            self.kv_tokens -= job.kv_tokens
            self.tokens += job.output
        return ended
