"""Whose waiting request a worker group begins next: priority raised by waiting, then tenants by weight. Pure.

Start-time fair queuing: a request is tagged when it comes with what its tenant had been promised by then, in tokens over weight;
lower tags go first. A tenant that was away begins where the others are. Gateways order their queues alike; here meet those of
several gateways, and all who waited for a wake.
"""

from __future__ import annotations

from workers.driver.sequence import Sequence

AGING_PER_S = 10.0
"""A request that has waited for a second counts as much as one whose priority is so much higher, so none waits for ever."""

FULL_WEIGHT = 100


class TenantShares:
    def __init__(self) -> None:
        self._promised: dict[str, float] = {}  # tenant -> where its next request begins
        self._now = 0.0  # tag of the last that began

    def enter(self, sequence: Sequence) -> None:
        """Tag one that comes. Copies that nobody waits for cost their tenant nothing."""
        request = sequence.request
        sequence.tag = max(self._now, self._promised.get(request.tenant, 0.0))
        if not request.shadow:
            self._promised[request.tenant] = sequence.tag + sequence.cost / request.tenant_weight

    def begin(self, sequence: Sequence) -> None:
        """It computes from now on."""
        self._now = max(self._now, sequence.tag or 0.0)
        self._promised = {tenant: promised for tenant, promised in self._promised.items() if promised > self._now}

    def leave(self, sequence: Sequence) -> None:
        """It ended before it began: its tenant did not get what it was promised."""
        request = sequence.request
        if not request.shadow and request.tenant in self._promised:
            self._promised[request.tenant] -= sequence.cost / request.tenant_weight

    def order(self, waiting: list[Sequence], now: float) -> None:
        """Sort those that wait: as urgent as the most urgent, give or take a second of waiting, are equals, among whom the tag
        decides; shadows come last."""
        if len(waiting) < 2:
            return
        urgency = {sequence: _urgency(sequence, now) for sequence in waiting}
        most = max(urgency.values())
        waiting.sort(
            key=lambda sequence: (
                sequence.request.shadow,
                int((most - urgency[sequence]) / AGING_PER_S),
                sequence.tag or 0.0,
                sequence.arrival,
            )
        )


def _urgency(sequence: Sequence, now: float) -> float:
    return sequence.request.priority + (now - sequence.since) * AGING_PER_S
