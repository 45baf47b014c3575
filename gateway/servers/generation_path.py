"""What all generations of a gateway share, and what they ask of it."""

from __future__ import annotations

import random

from gateway.admission.caller import Caller
from gateway.admission.gate import LONGEST_RETRY_S, Gate
from gateway.admission.quotas import Quotas
from gateway.api.errors import YardError, invalid, unavailable
from gateway.link.link import Link
from gateway.link.link_set import LinkSet
from gateway.routing import route_table
from gateway.routing.ask import Ask
from gateway.routing.replica_choice import ReplicaChoice
from gateway.servers.absence import why_absent
from gateway.servers.shadow_traffic import ShadowTraffic
from gateway.state.view import SiteView
from gateway.text.library import RETRY_FAILED_S, TextLibrary
from gateway.text.model_text import ModelText
from gateway.text.response_filter import FilterLibrary

RETRY_AFTER_S = 2.0
OVERCOMMIT = 2
"""Sequences let through to a pool, for each that it computes at once: enough wait there that no step runs half empty, and few
enough that the order is still decided here."""


class GenerationPath:
    """One per gateway. Without `quotas` none are counted."""

    def __init__(
        self, view: SiteView, library: TextLibrary, links: LinkSet, rng: random.Random, quotas: Quotas | None = None
    ) -> None:
        self.view = view
        self.library = library
        self.links = links
        self.rng = rng
        self.choice = ReplicaChoice[Link](rng)
        self.quotas = quotas
        self.gate = Gate(self._room, self._queue_limit, self._coming_s)
        self.shadows = ShadowTraffic(self)
        self.filters = FilterLibrary()
        links.on_load = self.gate.pump

    def resolve(self, name: str, ask: Ask | None = None, *, avoid: str | None = None) -> route_table.Resolved:
        """YardError as `route_table.unknown` when nothing has this name. `avoid`: a model that has just failed to answer."""
        return route_table.resolve(
            self.view,
            name,
            ready=lambda model: model != avoid and self.links.answering(model),
            ask=ask or Ask(pick=self.rng.random()),
        )

    def ask(self, caller: Caller) -> Ask:
        """What routes look at of a request, before its tokens are counted."""
        return Ask(caller.tenant, caller.headers, caller.quality, pick=self.rng.random(), shadow_pick=self.rng.random())

    async def text(self, resolved: route_table.Resolved) -> ModelText:
        """YardError(UNAVAILABLE) when this gateway cannot read the model's tokenizer, which is no fault of the request;
        YardError(INVALID) where it has none."""
        if resolved.entry.spec.reads_text:
            raise invalid(
                f"model `{resolved.model}` is a server that runs elsewhere, and its tokenizer is not here: set its "
                "spec.tokenizer",
                "model",
            )
        try:
            return await self.library.get(resolved.model, resolved.entry)
        except YardError as error:
            raise unavailable(f"model `{resolved.model}` cannot be asked here: {error.message}", RETRY_FAILED_S) from error

    def context(self, resolved: route_table.Resolved, text: ModelText) -> int:
        """Tokens of prompt plus answer: what the worker groups opened with, else what the manifest or the checkpoint says."""
        opened = self._opened_context(resolved.model)
        return opened or min(resolved.entry.spec.context or text.max_context, text.max_context)

    def known_context(self, model: str) -> int:
        """The same without waiting for the tokenizer; 0 when it is not known yet."""
        text = self.library.loaded(model)
        return self._opened_context(model) or self.view.models[model].spec.context or (text.max_context if text else 0)

    def _opened_context(self, model: str) -> int:
        groups = [group for _, group in self.view.groups(model) if group.context and group.state in ("ready", "parked")]
        return min((group.context for group in groups), default=0)

    def ready(self, model: str) -> bool:
        """It answers now, or after a wake. What still loads is asked only when nothing else of a route is ready."""
        return bool(self.links.serving(model))

    def _room(self, model: str, inside: int) -> int | None:
        """Sequences that its pools would compute, and as many that wait there, less what is there or on its way.

        While none is ready, as many as may be held: the driver tells them how long, or refuses what cannot wait (rule 6).
        """
        entry = self.view.models.get(model)
        links = self.links.rotation(model)
        if entry is None or not links:
            return None  # whoever is let through waits for a replica, or is told why there is none
        groups = sum(link.ready_groups(model) for link in links)
        if not groups:
            return max(entry.spec.limits.queue, 1) - inside
        there = sum(link.load.sequences(model) for link in links)
        overcommit = OVERCOMMIT if entry.spec.is_managed else 1  # a server's own queue is not known
        return overcommit * entry.spec.limits.concurrency * groups - max(there, inside)

    def _queue_limit(self, model: str) -> int:
        """So many for each replica that serves, or will before whoever waits would be better told to come again."""
        entry = self.view.models.get(model)
        soon = sum(wait_s <= LONGEST_RETRY_S for wait_s in self.view.coming_s(model))
        return 0 if entry is None else entry.spec.limits.queue * max(1, self.view.ready_groups(model) + soon)

    def _coming_s(self, model: str) -> float | None:
        return min(self.view.coming_s(model), default=None)

    def why_unavailable(self, model: str) -> YardError:
        if (server := self.links.server(model)) is not None:
            return unavailable(f"model `{model}` cannot answer now: {server.reason}", RETRY_AFTER_S)
        return unavailable(why_absent(self.view, model, self.links.last_pools(model)), RETRY_AFTER_S)
