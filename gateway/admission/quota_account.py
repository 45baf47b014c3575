"""What one gateway has been lent of one tenant's quotas, and what it spent of it. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.config import QuotaSpec

BATCH_S = 0.5
"""A gateway holds at most what the quota gives in so long, beside what waits for it: so much may be lost with it."""


@dataclass(slots=True)
class Bucket:
    """Credit of one kind. It may go below zero: an answer's tokens are known when they are there; the debt is paid first."""

    rate: float
    capacity: float
    least: float  # credit without which nothing is let through
    credit: float = 0.0

    @property
    def open(self) -> bool:
        return self.rate <= 0 or self.credit >= self.least

    @property
    def batch(self) -> float:
        return min(self.capacity, max(self.rate * BATCH_S, self.least))

    def wanted(self, waiting: float) -> float:
        """To ask for now: enough for those that wait, and a batch; nothing while half a batch is here."""
        if self.rate <= 0 or (not waiting and self.credit >= self.batch / 2):
            return 0.0
        return max(0.0, min(self.capacity, self.batch + waiting) - self.credit)

    def refill(self, seconds: float, gateways: int) -> None:
        """What the store would have given, as it was last shared."""
        if self.rate > 0:
            self.credit = min(self.batch, self.credit + seconds * self.rate / max(1, gateways))

    def wait_s(self) -> float:
        """Until there is credit again, if nobody else takes any."""
        return max(0.0, self.least - self.credit) / self.rate if self.rate > 0 else 0.0


class QuotaAccount:
    """Requests are paid when they come, prompts too, answers when they end.

    A request is let through while there is credit for one request and any credit of tokens; so a prompt longer than all
    credit passes too, and those after it wait until it is paid.
    """

    def __init__(self, quota: QuotaSpec) -> None:
        self.quota = quota
        requests, tokens = quota.requests_per_s or 0.0, quota.tokens_per_s or 0.0
        self.requests = Bucket(requests, max(1.0, requests * quota.burst_s), least=1.0)
        self.tokens = Bucket(tokens, max(1.0, tokens * quota.burst_s), least=1e-6)
        self.waiting = 0

    @property
    def open(self) -> bool:
        return self.requests.open and self.tokens.open

    def take(self, tokens: int) -> None:
        self.requests.credit -= 1
        self.tokens.credit -= tokens

    def wanted(self) -> tuple[float, float]:
        return self.requests.wanted(self.waiting), self.tokens.wanted(float(bool(self.waiting)))

    def lent(self, requests: float, tokens: float) -> None:
        self.requests.credit += requests
        self.tokens.credit += tokens

    def wait_s(self) -> float:
        return max(self.requests.wait_s(), self.tokens.wait_s())
