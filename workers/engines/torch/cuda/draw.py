"""Drawing tokens where the logits are: nothing here waits for the GPU.

Noise is that of the CPU's sampler, a hash of (seed, position, token): the same request gets the same in any batch, on any rank,
and after a preemption. What penalties must know of a sequence is kept on its device, because a step begins before
the token of the one before it has reached the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engines.torch.constraint import Constraint
from workers.engines.torch.cuda import ops
from workers.engines.torch.head import not_finite
from workers.engines.torch.noise import keys
from workers.engines.torch.sampler import sane
from workers.messages import NewSequence, SampledToken, Sampling

SPAN = 88.0  # e^-88 is the smallest normal fp32
_STEPS = 32  # of bisection over SPAN: finer than fp32 can tell logits apart


class TokenCounts:
    """What penalties look at: how often each token was generated, and which occurred at all."""

    def __init__(self, vocabulary: int, new: NewSequence, device: torch.device) -> None:
        generated = torch.tensor(new.generated, dtype=torch.int64)
        counts = torch.bincount(generated, minlength=vocabulary).to(torch.float32)
        seen = counts > 0
        if new.prompt:
            seen[torch.tensor(new.prompt)] = True
        self.counts = counts.to(device)
        self.seen = seen.to(device)

    def add(self, token: torch.Tensor) -> None:
        """`token` [1], on the device."""
        self.counts.index_add_(0, token, torch.ones_like(token, dtype=torch.float32))
        self.seen.index_fill_(0, token, True)

    def penalize(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """[vocabulary] fp32. Repetition as in CTRL (arXiv:1909.05858), presence and frequency as in OpenAI's API."""
        penalty = sampling.repetition_penalty
        if penalty != 1.0:
            punished = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self.seen, punished, logits)
        return logits - sampling.presence_penalty * (self.counts > 0) - sampling.frequency_penalty * self.counts


@dataclass
class DrawState:
    """Of one sequence."""

    sampling: Sampling
    position: int  # tokens drawn so far
    tokens: TokenCounts | None  # only where a penalty looks at them
    constraint: Constraint | None = None  # where the answer must follow a JSON schema

    @classmethod
    def start(cls, new: NewSequence, vocabulary: int, device: torch.device) -> DrawState:
        sampling = sane(new.sampling)
        plain = sampling.repetition_penalty == 1.0 and not sampling.presence_penalty and not sampling.frequency_penalty
        return cls(sampling, len(new.generated), None if plain else TokenCounts(vocabulary, new, device))

    @property
    def error(self) -> str:
        return self.constraint.error if self.constraint is not None else ""

    @property
    def is_plain_greedy(self) -> bool:
        return self.sampling.temperature == 0.0 and self.sampling.logprobs < 0 and self.tokens is None and self.constraint is None


@dataclass(frozen=True)
class LogProbabilities:
    """Of rows that asked for them, in their order; on the host once the copy has arrived."""

    rows: list[int]
    chosen: torch.Tensor  # [rows]
    ids: torch.Tensor  # [rows, most alternatives asked]
    values: torch.Tensor


@dataclass(frozen=True)
class Drawn:
    tokens: torch.Tensor  # [n] int64
    largest: torch.Tensor  # [n], the logits of the most likely tokens
    log_probabilities: LogProbabilities | None = None

    def sampled(self, sequences: list[int], states: list[DrawState]) -> tuple[SampledToken, ...]:
        """Where the tensors are on the host. DamagedModelError where logits are no numbers."""
        if not bool(self.largest.isfinite().all()):
            raise not_finite()
        tokens: list[int] = self.tokens.tolist()
        if self.log_probabilities is None:
            return tuple(
                SampledToken(sequence, token, error=state.error)
                for sequence, token, state in zip(sequences, tokens, states, strict=True)
            )
        found = self.log_probabilities
        told = {row: number for number, row in enumerate(found.rows)}
        chosen, ids, values = found.chosen.tolist(), found.ids.tolist(), found.values.tolist()
        sampled = []
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if row not in told:
                sampled.append(SampledToken(sequence, token, error=states[row].error))
                continue
            number, count = told[row], states[row].sampling.logprobs
            alternatives = tuple(ids[number][:count]), tuple(values[number][:count])
            sampled.append(SampledToken(sequence, token, chosen[number], *alternatives, error=states[row].error))
        return tuple(sampled)


def draw(logits: torch.Tensor, greedy: torch.Tensor, states: list[DrawState]) -> Drawn:
    """logits [n, vocabulary] and the largest of each row. Advances the states; the result is on the device."""
    largest = logits.gather(1, greedy.unsqueeze(1)).squeeze(1)
    if all(state.is_plain_greedy for state in states):
        for state in states:
            state.position += 1
        return Drawn(greedy, largest)
    raw = logits.float()
    tokens = greedy.clone()
    penalized = [row for row, state in enumerate(states) if state.tokens is not None]
    held = [row for row, state in enumerate(states) if state.constraint is not None]
    changed = raw.clone() if penalized or held else raw
    for row in penalized:
        counts = states[row].tokens
        assert counts is not None
        changed[row] = counts.penalize(changed[row], states[row].sampling)
        tokens[row] = changed[row].argmax()
    for row in held:
        _mask(changed[row], states[row])
        tokens[row] = changed[row].argmax()
    random = [row for row, state in enumerate(states) if state.sampling.temperature > 0.0]
    if random:
        rows = _on(random, torch.int64, raw.device)
        tokens[rows] = _draw(changed, rows, [states[row] for row in random])
    for row in penalized:
        counts = states[row].tokens
        assert counts is not None
        counts.add(tokens[row : row + 1])
    for state in states:
        state.position += 1
    return Drawn(tokens, largest, _log_probabilities(raw, tokens, states))


def _mask(row: torch.Tensor, state: DrawState) -> None:
    """In place: what the schema forbids here. The driver has told the last token, so nothing waits for the GPU."""
    constraint = state.constraint
    assert constraint is not None
    allowed = constraint.allowed(row.shape[0])
    if allowed is not None:
        forbidden = torch.from_numpy(~allowed)
        forbidden = forbidden.pin_memory() if row.is_cuda else forbidden
        row.masked_fill_(forbidden.to(row.device, non_blocking=True), -torch.inf)


def _log_probabilities(raw: torch.Tensor, tokens: torch.Tensor, states: list[DrawState]) -> LogProbabilities | None:
    """Those of the model itself, before penalties, temperature and filters."""
    asked = [row for row, state in enumerate(states) if state.sampling.logprobs >= 0]
    if not asked:
        return None
    rows = _on(asked, torch.int64, raw.device)
    log = torch.log_softmax(raw[rows], dim=-1)
    most = min(max(states[row].sampling.logprobs for row in asked), raw.shape[1])
    values, ids = log.topk(most, dim=-1)
    return LogProbabilities(asked, log.gather(1, tokens[rows].unsqueeze(1)).squeeze(1), ids, values)


def _draw(logits: torch.Tensor, rows: torch.Tensor, states: list[DrawState]) -> torch.Tensor:
    device = logits.device
    sampling = [state.sampling for state in states]
    temperature = _on([one.temperature for one in sampling], torch.float32, device)
    top_k = _on([one.top_k for one in sampling], torch.int32, device)
    top_p = _on([one.top_p for one in sampling], torch.float32, device)
    min_p = _on([one.min_p for one in sampling], torch.float32, device)
    numbers = [keys(state.sampling.seed, state.position) for state in states]
    low, high = (_on(part, torch.int64, device) for part in map(list, zip(*numbers, strict=True)))
    return ops.draw(logits, rows, ops.Filters(temperature, top_k, top_p, min_p), low, high, SPAN, _STEPS)


def _on(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that the copy does not wait for what runs; torch keeps it until the copy is done."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
