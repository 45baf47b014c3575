"""From logits to tokens, vectorised over the sequences of a step.

What is promised of seeds: the noise of a draw depends on (seed, position, token) alone (`noise`), so equal logits give equal
tokens, in any batch, however prompts are cut, on any rank, and after a preemption. Logits of differently shaped steps may differ
by rounding, which changes a token only where two come that near to each other. A request without a seed got one at the gateway.
Reported log-probabilities are those of the model itself, before penalties, temperature and filters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch

from workers.engines.torch.constraint import Constraint
from workers.engines.torch.head import not_finite
from workers.engines.torch.noise import gumbel
from workers.messages import NewSequence, SampledToken, Sampling

_CANDIDATES = 512  # top-p looks at so many first; their mass nearly always suffices, and a full sort costs 30 times more
COLDEST, HOTTEST = 1e-4, 1e4  # below, temperatures are greedy; above, nothing changes any more
_MOST_PENALTY = 1e3


def sane(sampling: Sampling) -> Sampling:
    """What a sampler can compute with: no NaN, no infinity, nothing outside its range. Gateways refuse such values before."""
    temperature = _within(sampling.temperature, 0.0, HOTTEST, 0.0)
    return msgspec.structs.replace(
        sampling,
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=_within(sampling.top_p, 0.0, 1.0, 1.0),
        top_k=max(0, sampling.top_k),
        min_p=_within(sampling.min_p, 0.0, 1.0, 0.0),
        repetition_penalty=_within(sampling.repetition_penalty, 1 / _MOST_PENALTY, _MOST_PENALTY, 1.0),
        presence_penalty=_within(sampling.presence_penalty, -_MOST_PENALTY, _MOST_PENALTY, 0.0),
        frequency_penalty=_within(sampling.frequency_penalty, -_MOST_PENALTY, _MOST_PENALTY, 0.0),
    )


def _within(value: float, low: float, high: float, instead_of_nan: float) -> float:
    return instead_of_nan if math.isnan(value) else min(max(value, low), high)


@dataclass
class SampleState:
    """What sampling must remember of one sequence."""

    sampling: Sampling
    position: int = 0  # tokens generated so far
    counts: Counter[int] = field(default_factory=Counter)  # of generated tokens, kept only where a penalty needs them
    seen: set[int] = field(default_factory=set)  # prompt and generated, likewise
    constraint: Constraint | None = None  # where the answer must follow a JSON schema

    @classmethod
    def start(cls, new: NewSequence) -> SampleState:
        state = cls(sane(new.sampling), len(new.generated))
        if state.counts_tokens:
            state.counts.update(new.generated)
        if state.sampling.repetition_penalty != 1.0:
            state.seen.update(new.prompt, new.generated)
        return state

    @property
    def counts_tokens(self) -> bool:
        return self.sampling.presence_penalty != 0.0 or self.sampling.frequency_penalty != 0.0

    @property
    def takes_largest(self) -> bool:
        """The token is where logit + temperature * noise is largest; nobody asks for the other logits."""
        sampling = self.sampling
        unfiltered = sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p == 0.0
        return (
            (sampling.temperature == 0.0 or unfiltered)
            and sampling.logprobs < 0
            and sampling.repetition_penalty == 1.0
            and not self.counts_tokens
            and self.constraint is None
        )

    def noise(self, tokens: np.ndarray) -> torch.Tensor:
        """Of its next token; fp32, one of each id (uint32)."""
        return gumbel(self.sampling.seed, self.position, tokens)

    def add(self, token: int) -> None:
        self.position += 1
        if self.counts_tokens:
            self.counts[token] += 1
        if self.sampling.repetition_penalty != 1.0:
            self.seen.add(token)


class Head(Protocol):
    @property
    def vocabulary(self) -> int: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocabulary]"""
        ...

    def argmax(self, hidden: torch.Tensor, noise: Sequence[torch.Tensor | None]) -> list[int]:
        """Of every row, with its noise [vocabulary] added; may be cheaper than the logits. DamagedModelError as `argmax`."""
        ...


def sample(head: Head, hidden: torch.Tensor, sequences: list[int], states: list[SampleState]) -> tuple[SampledToken, ...]:
    """hidden [n, hidden], row i of sequences[i]. Advances the states. DamagedModelError when logits are no numbers."""
    quick = [row for row, state in enumerate(states) if state.takes_largest]
    sampled: dict[int, SampledToken] = {}
    if quick:
        noise = [_scaled_noise(states[row], head.vocabulary) for row in quick]
        tokens = head.argmax(hidden if len(quick) == len(states) else hidden[quick], noise)
        sampled = {row: SampledToken(sequences[row], token) for row, token in zip(quick, tokens, strict=True)}
    if len(quick) < len(states):
        others = [row for row in range(len(states)) if row not in sampled]
        logits = head.logits(hidden[others] if quick else hidden).float()
        found = _sample(logits, [sequences[row] for row in others], [states[row] for row in others])
        sampled.update(zip(others, found, strict=True))
    for row, state in enumerate(states):
        state.add(sampled[row].token)
    return tuple(sampled[row] for row in range(len(states)))


def _scaled_noise(state: SampleState, vocabulary: int) -> torch.Tensor | None:
    temperature = state.sampling.temperature
    return state.noise(np.arange(vocabulary, dtype=np.uint32)).mul_(temperature) if temperature > 0.0 else None


def _sample(logits: torch.Tensor, sequences: list[int], states: list[SampleState]) -> tuple[SampledToken, ...]:
    raw = logits
    chosen = argmax(raw)  # also looks whether they are numbers
    if any(state.seen or state.counts or state.constraint for state in states):
        logits = logits.clone()
        for row, state in zip(logits, states, strict=True):
            _penalize(row, state)
            if state.constraint is not None and (allowed := state.constraint.allowed(len(row))) is not None:
                row.numpy()[~allowed] = -np.inf
        chosen = argmax(logits)
    for row, state in enumerate(states):
        if state.sampling.temperature > 0.0:
            chosen[row] = _draw(logits[row], state)
    return tuple(
        _report(raw[row], sequence, token, states[row])
        for row, (sequence, token) in enumerate(zip(sequences, chosen, strict=True))
    )


def argmax(logits: torch.Tensor, noise: Sequence[torch.Tensor | None] = ()) -> list[int]:
    """By numpy: 20 times as fast as torch's on CPU for a large vocabulary. DamagedModelError where no logit is the largest."""
    rows = logits.float().numpy()
    tokens = rows.argmax(axis=-1)
    if not np.isfinite(np.take_along_axis(rows, tokens[:, None], axis=-1)).all():
        raise not_finite()
    found: list[int] = tokens.tolist()
    for row, added in enumerate(noise):
        if added is not None:
            found[row] = int((rows[row] + added.numpy()).argmax())
    return found


def _penalize(row: torch.Tensor, state: SampleState) -> None:
    """In place. Repetition as in CTRL (arXiv:1909.05858), presence and frequency as in OpenAI's API."""
    sampling = state.sampling
    if state.seen:
        ids = torch.tensor(sorted(state.seen))
        values = row[ids]
        penalty = sampling.repetition_penalty
        row[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if state.counts:
        ids = torch.tensor(list(state.counts.keys()))
        counts = torch.tensor(list(state.counts.values()), dtype=row.dtype)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _draw(logits: torch.Tensor, state: SampleState) -> int:
    """[vocabulary] → one token: temperature, then top-k, top-p and min-p, then the largest with noise of what is left."""
    sampling = state.sampling
    scaled = (logits - logits.max()) / sampling.temperature
    vocabulary = scaled.shape[0]
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        if sampling.min_p > 0.0:
            scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -math.inf)
        return int((scaled + state.noise(np.arange(vocabulary, dtype=np.uint32))).numpy().argmax())
    values, ids = _filtered(scaled, sampling)
    return int(ids[int((values + state.noise(ids.numpy().astype(np.uint32))).argmax())])


def _filtered(scaled: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of what top-k, top-p and min-p leave, the most likely first; at least one. `scaled` is at most 0."""
    vocabulary = scaled.shape[0]
    top_k = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    width = top_k if top_k < vocabulary else min(vocabulary, _CANDIDATES)
    # top-p is of what top-k left, as in every other server.
    total = float(scaled.exp().sum(dtype=torch.float64)) if top_k == vocabulary else 0.0
    values, ids = scaled.topk(width)
    mass = values.double().exp()
    if total and float(mass.sum()) < sampling.top_p * total:
        values, ids = scaled.sort(descending=True)
        mass = values.double().exp()
    before = mass.cumsum(0) - mass
    kept = before < sampling.top_p * (total or float(mass.sum()))  # the token that reaches the mass is kept
    if sampling.min_p > 0.0:
        kept &= values >= math.log(sampling.min_p)
    kept[0] = True
    return values[kept], ids[kept]


def _report(raw: torch.Tensor, sequence: int, token: int, state: SampleState) -> SampledToken:
    if state.constraint is not None and state.constraint.error:
        return SampledToken(sequence, token, error=state.constraint.error)
    logprobs = state.sampling.logprobs
    if logprobs < 0:
        return SampledToken(sequence, token)
    log = torch.log_softmax(raw, dim=-1)
    if logprobs == 0:
        return SampledToken(sequence, token, float(log[token]))
    values, ids = log.topk(min(logprobs, log.shape[0]))
    return SampledToken(sequence, token, float(log[token]), tuple(ids.tolist()), tuple(values.tolist()))
