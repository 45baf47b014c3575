"""What a run came to: percentiles, tokens a second, and goodput under an SLO. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds, `began_s` from the start of the run."""

    began_s: float
    first_s: float = 0.0  # to its first text
    total_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between pieces of text
    error: str = ""  # a code of ours, or of HTTP
    cancelled: bool = False  # by us, on purpose

    @property
    def ok(self) -> bool:
        return not self.error and not self.cancelled

    @property
    def token_s(self) -> float:
        """Between two tokens, on average."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    first_token_ms: float | None = None
    token_ms: float | None = None

    def met(self, outcome: Outcome) -> bool:
        if not outcome.ok:
            return False
        first = self.first_token_ms is None or outcome.first_s * 1000 <= self.first_token_ms
        return first and (self.token_ms is None or outcome.token_s * 1000 <= self.token_ms)


def report(outcomes: Sequence[Outcome], elapsed_s: float, slo: Slo) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if outcome.ok]
    seconds = max(elapsed_s, 1e-9)
    good = sum(slo.met(outcome) for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "cancelled": sum(outcome.cancelled for outcome in outcomes),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "elapsed_s": round(elapsed_s, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(sum(outcome.tokens for outcome in done) / seconds, 2),
        "total_tokens_per_s": round(sum(outcome.tokens + outcome.prompt_tokens for outcome in done) / seconds, 2),
        "first_token_ms": percentiles([outcome.first_s for outcome in done]),
        "token_ms": percentiles([outcome.token_s for outcome in done if outcome.tokens > 1]),
        "gap_ms": percentiles([gap for outcome in done for gap in outcome.gaps_s]),
        "request_ms": percentiles([outcome.total_s for outcome in done]),
        "slo": {"first_token_ms": slo.first_token_ms, "token_ms": slo.token_ms},
        "goodput_per_s": round(good / seconds, 3),
        "good_share": round(good / len(outcomes), 4) if outcomes else 0.0,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; empty without values."""
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds) * 1000, PERCENTILES)
    named = {f"p{name}": round(float(value), 2) for name, value in zip(PERCENTILES, values, strict=True)}
    return {**named, "mean": round(float(np.mean(seconds)) * 1000, 2), "max": round(max(seconds) * 1000, 2)}


def by_second(outcomes: Sequence[Outcome], elapsed_s: float) -> tuple[list[float], list[int]]:
    """Of each second of the run: tokens of the requests that ended in it, and errors."""
    tokens, errors = [0.0] * (int(elapsed_s) + 1), [0] * (int(elapsed_s) + 1)
    for outcome in outcomes:
        second = min(int(outcome.began_s + outcome.total_s), len(tokens) - 1)
        tokens[second] += outcome.tokens
        errors[second] += bool(outcome.error)
    return tokens, errors


def lines(summary: dict[str, Any]) -> list[str]:
    """For people."""
    errors = ", ".join(f"{count} {code}" for code, count in sorted(summary["errors"].items())) or "none"
    told = [
        f"requests   {summary['completed']} of {summary['requests']} answered in {summary['elapsed_s']:.1f} s, "
        f"{summary['cancelled']} cancelled, errors: {errors}",
        f"speed      {summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} tokens/s generated, "
        f"{summary['total_tokens_per_s']:.1f} with prompts",
    ]
    for key, name in (("first_token_ms", "first"), ("token_ms", "token"), ("request_ms", "request")):
        if values := summary[key]:
            told.append(f"{name:<9}  " + ", ".join(f"{which} {value:.1f} ms" for which, value in values.items()))
    wanted = ", ".join(f"{key} {value:g}" for key, value in summary["slo"].items() if value is not None)
    if wanted:
        told.append(f"goodput    {summary['goodput_per_s']:.2f} requests/s within {wanted} ({summary['good_share']:.1%} of all)")
    return told
