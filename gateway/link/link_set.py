"""The links of a gateway: one per pool whose driver is alive, and one per model whose server runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from gateway.api.config import ModelSpec
from gateway.api.records import GroupRecord, PoolRecord
from gateway.api.tasks import cancelled
from gateway.link.link import Link
from gateway.link.openai_server import OpenAiServer
from gateway.link.pool_link import PoolLink
from gateway.link.server_link import ServerLink
from gateway.link.trtllm_server import TrtllmServer

LOOK_S = 0.5

log = logging.getLogger(__name__)


class LinkSet:
    """Follows the pool records of the site, and its models whose servers run elsewhere (`follow_servers`).

    - A new record: a link to it.
    - A record with another incarnation or endpoint: a new link; the old one is retired.
    - A record gone: its link is retired. What is in flight on a stream that still works is allowed to finish.
    - Twice a second it looks for pools that are stuck and for retired links that have gone silent: what is in flight there ends,
      whether or not anybody asks for these pools again.
    - A model of a server: a link to it; with another specification a new one, and the old one is retired.
    """

    def __init__(self, *, gateway: str, secret: str) -> None:
        self._gateway = gateway
        self._secret = secret
        self._links: dict[str, PoolLink] = {}
        self._retired: list[PoolLink] = []
        self._servers: dict[str, ServerLink] = {}  # by model
        self._retired_servers: list[ServerLink] = []
        self._changed: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._held_at: dict[str, float] = {}  # model -> when a pool last held it
        self._held_by: dict[str, frozenset[str]] = {}  # model -> the pools that did
        self.on_load: Callable[[str], None] = lambda model: None  # a pool told its load of a model
        self.on_server: Callable[[], None] = lambda: None  # a server was looked at, or came or went

    def reconcile(self, records: Mapping[str, PoolRecord]) -> None:
        for pool in [pool for pool in self._links if pool not in records]:
            self._retire(pool, "its driver's heartbeat expired")
        for pool, record in records.items():
            link = self._links.get(pool)
            if link is not None and (link.incarnation, link.endpoint) != (record.incarnation, record.endpoint):
                self._retire(pool, "its driver was restarted")
                link = None
            if link is None:
                self._links[pool] = PoolLink(
                    record,
                    gateway=self._gateway,
                    secret=self._secret,
                    on_change=self._announce,
                    on_load=lambda model: self.on_load(model),
                )
            else:
                link.update(record)
        self._begin_watch()
        now = asyncio.get_running_loop().time()
        holders: dict[str, set[str]] = {}
        for pool, link in self._links.items():
            for model in link.held_models:
                holders.setdefault(model, set()).add(pool)
        self._held_at |= dict.fromkeys(holders, now)
        self._held_by |= {model: frozenset(pools) for model, pools in holders.items()}
        self._retired = [link for link in self._retired if not link.closed]
        self._announce()

    def follow_servers(self, models: Mapping[str, tuple[ModelSpec, int]]) -> None:
        """Of these models (specification and generation), those that are not managed."""
        wanted = {model: entry for model, entry in models.items() if not entry[0].is_managed and entry[0].replicas}
        for model in [model for model in self._servers if model not in wanted]:
            self._retire_server(model, "it is no target any more")
        for model, (spec, generation) in wanted.items():
            link = self._servers.get(model)
            if link is not None and link.asks_as(spec):
                link.update(spec, generation)
                continue
            if link is not None:
                self._retire_server(model, "its specification was changed")
            server = OpenAiServer(model, spec) if spec.answers_in_text else TrtllmServer(model, spec)
            self._servers[model] = ServerLink(model, spec, generation, server, on_change=self._server_changed)
        self._begin_watch()
        self._retired_servers = [link for link in self._retired_servers if not link.closed]

    def server(self, model: str) -> ServerLink | None:
        """The link of a model whose server runs elsewhere."""
        return self._servers.get(model)

    def servers(self) -> tuple[GroupRecord, ...]:
        """The state of all of them."""
        return tuple(self._servers[model].record() for model in sorted(self._servers))

    def serving(self, model: str) -> Sequence[Link]:
        """Links to the pools that can answer for the model: those with a ready group, else those that bring a parked one in.
        And to its server, where that is there."""
        if (server := self._servers.get(model)) is not None:
            return [server] if server.ready_groups(model) else []
        links = [link for link in self._links.values() if link.ready_groups(model)]
        return links or [link for link in self._links.values() if link.groups(model, "parked")]

    def holding(self, model: str) -> Sequence[Link]:
        """Links to the pools that take requests for the model: those that serve it, else those where it is on its way, which
        hold them with an estimate (rule 6)."""
        return self.serving(model) or [link for link in self._links.values() if link.coming_groups(model)]

    def rotation(self, model: str) -> list[Link]:
        """Of those that hold it, the ones that can be asked now: connected, and not stuck."""
        return [link for link in self.holding(model) if link.up and not link.is_stuck]

    def answering(self, model: str) -> bool:
        """Whether one of those that serve it can be asked now."""
        return any(link.up and not link.is_stuck for link in self.serving(model))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for link in [*self._links.values(), *self._retired]:
                if link.in_flight and link.is_silent:
                    link.abandon()
                _ = link.is_stuck  # lets go of what is in flight
            for server in [*self._servers.values(), *self._retired_servers]:
                _ = server.is_stuck

    def held_lately(self, model: str, within_s: float) -> bool:
        """Whether a pool held it so short a time ago that its driver may only be restarting."""
        return asyncio.get_running_loop().time() - self._held_at.get(model, float("-inf")) < within_s

    def last_pools(self, model: str) -> frozenset[str]:
        """The pools that held it when any was last heard to."""
        return self._held_by.get(model, frozenset())

    @property
    def in_flight(self) -> int:
        pools, servers = [*self._links.values(), *self._retired], [*self._servers.values(), *self._retired_servers]
        return sum(link.in_flight for link in (*pools, *servers))

    async def wait_change(self, timeout_s: float) -> None:
        """Returns when a link came up or went down or a record changed, at the latest after `timeout_s`."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=timeout_s)

    async def close(self) -> None:
        await cancelled([self._watch])
        links = [*self._links.values(), *self._retired, *self._servers.values(), *self._retired_servers]
        self._links, self._retired, self._held_at = {}, [], {}
        self._servers, self._retired_servers = {}, []
        await asyncio.gather(*(link.close("the gateway stops; another one answers at its address, ask again") for link in links))

    def _retire(self, pool: str, reason: str) -> None:
        link = self._links.pop(pool)
        log.info("link to pool %s is retired: %s", pool, reason)
        link.retire(f"pool `{pool}`: {reason}")
        self._retired.append(link)

    def _begin_watch(self) -> None:
        if self._watch is None and (self._links or self._servers):
            self._watch = asyncio.create_task(self._look(), name="links-watch")

    def _retire_server(self, model: str, reason: str) -> None:
        link = self._servers.pop(model)
        log.info("link to the server of model %s is retired: %s", model, reason)
        link.retire(reason)
        self._retired_servers.append(link)

    def _server_changed(self) -> None:
        self._announce()
        self.on_server()

    def _announce(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
