"""How far two models are apart, from what each says of the next token at the same places. Pure.

A distribution is known by its likeliest tokens; what they leave over is one more outcome, spread evenly over the rest of the
vocabulary where a single token of it is asked for. Both models are judged alike, so comparisons hold; a perplexity is exact where
the true token is among the likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FLOOR = 1e-9  # of a probability


@dataclass(frozen=True)
class Place:
    """One position of a text: what came next there, and what both models thought of it."""

    true_token: int
    reference: Mapping[int, float]  # token -> log-probability, of the likeliest
    candidate: Mapping[int, float]


@dataclass(frozen=True)
class Task:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Limits:
    """Beyond which a candidate is not promoted."""

    top1: float = 0.9  # at least
    kl: float = 0.05  # nats a token, at most
    perplexity: float = 0.05  # relative increase, at most
    tasks: float = 0.02  # share of tasks lost against the reference, at most


@dataclass(frozen=True)
class Report:
    places: int
    top1_agreement: float
    kl_mean: float
    kl_p99: float
    perplexity_reference: float
    perplexity_candidate: float
    tasks: int
    tasks_reference: float  # share answered right
    tasks_candidate: float
    failures: tuple[str, ...]  # limits that are passed, in words

    @property
    def passed(self) -> bool:
        return not self.failures


def judge(places: Sequence[Place], vocabulary: int, right: Sequence[tuple[bool, bool]], limits: Limits) -> Report:
    """`right`: for each task, whether the reference and the candidate answered it. ValueError without a place."""
    if not places:
        raise ValueError("nothing to compare: the texts have no position with enough tokens before it")
    agreement = sum(_top(place.reference) == _top(place.candidate) for place in places) / len(places)
    divergences = sorted(divergence(place.reference, place.candidate) for place in places)
    kl = sum(divergences) / len(divergences)
    before = _perplexity([place.reference for place in places], places, vocabulary)
    after = _perplexity([place.candidate for place in places], places, vocabulary)
    shares = [sum(answers[who] for answers in right) / len(right) if right else 0.0 for who in (0, 1)]
    failures = []
    if agreement < limits.top1:
        failures.append(f"top-1 agreement is {agreement:.1%}, at least {limits.top1:.1%} is wanted")
    if kl > limits.kl:
        failures.append(f"KL divergence is {kl:.4f} nats a token, at most {limits.kl:g} is wanted")
    if after > before * (1 + limits.perplexity):
        failures.append(f"perplexity rises by {after / before - 1:.1%}, at most {limits.perplexity:.1%} is wanted")
    if shares[0] - shares[1] > limits.tasks:
        failures.append(f"{shares[0] - shares[1]:.1%} of the tasks are lost, at most {limits.tasks:.1%} is wanted")
    return Report(
        places=len(places),
        top1_agreement=agreement,
        kl_mean=kl,
        kl_p99=divergences[min(len(divergences) - 1, int(0.99 * len(divergences)))],
        perplexity_reference=before,
        perplexity_candidate=after,
        tasks=len(right),
        tasks_reference=shares[0],
        tasks_candidate=shares[1],
        failures=tuple(failures),
    )


def divergence(reference: Mapping[int, float], candidate: Mapping[int, float]) -> float:
    """KL(reference || candidate) over the tokens that both name, and one outcome for all others. A lower bound of the whole."""
    both = reference.keys() & candidate.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - candidate[token]) for token in both)
    rest = [max(_FLOOR, 1 - sum(math.exp(known[token]) for token in both)) for known in (reference, candidate)]
    return max(0.0, total + rest[0] * math.log(rest[0] / rest[1]))


def log_probability(known: Mapping[int, float], token: int, vocabulary: int) -> float:
    if token in known:
        return known[token]
    rest = max(_FLOOR, 1 - sum(map(math.exp, known.values())))
    return math.log(rest / max(1, vocabulary - len(known)))


def _top(known: Mapping[int, float]) -> int:
    return max(known, key=lambda token: (known[token], -token))


def _perplexity(distributions: Sequence[Mapping[int, float]], places: Sequence[Place], vocabulary: int) -> float:
    total = sum(log_probability(known, place.true_token, vocabulary) for known, place in zip(distributions, places, strict=True))
    return math.exp(-total / len(places))
