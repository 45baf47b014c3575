"""Quotas of tenants, over all gateways of a site: leased from Redis in batches, beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from importlib.resources import files
from typing import Literal

from redis.asyncio.client import Pipeline

from gateway.admission.caller import Caller
from gateway.admission.quota_account import QuotaAccount
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.state.connection import LOST
from gateway.state.store import SiteStore
from gateway.state.view import SiteView

log = logging.getLogger(__name__)

LEASE_S = 0.1
SHORTEST_PAUSE_S = 0.005
LEASE_WAIT_S = 0.25
"""A request that finds no credit waits so long for the lease that is on its way; then Redis counts as away."""

WithoutRedis = Literal["allow", "deny", "last"]


class Quotas:
    """1. A tenant without quotas passes.
    2. With credit here, the request takes of it and passes: no call to Redis.
    3. Without, it waits for the next lease, which is asked for at once. The lease gives nothing: RESOURCE_EXHAUSTED, with the
       time until there is quota again.
    4. Redis does not answer: what the site file says. allow: it passes; deny: UNAVAILABLE; last: this gateway goes on with
       the share of the rate that it had, refilled by its own clock.
    """

    def __init__(self, view: SiteView, store: SiteStore, without_redis: WithoutRedis) -> None:
        self._view = view
        self._store = store
        self._without_redis: WithoutRedis = without_redis
        self._accounts: dict[str, QuotaAccount] = {}
        self._script = files("gateway.admission").joinpath("quota.lua").read_text(encoding="utf-8")
        self._wake = asyncio.Event()
        self._leased: asyncio.Future[None] | None = None
        self._away = False
        self._refilled_s = time.monotonic()
        self._gateways = 1

    async def admit(self, caller: Caller, prompt_tokens: int) -> None:
        """YardError when the tenant has no quota left."""
        account = self._account(caller)
        if account is None:
            return
        if not (account.open or self._away):
            await self._wait_for_lease(account)
        if self._away:
            if self._without_redis == "allow":
                return
            if self._without_redis == "deny":
                raise unavailable(f"quotas of tenant `{caller.tenant}` cannot be counted while the store is away", 2.0)
            self._refill()
        if not account.open:
            wait_s = max(LEASE_S, account.wait_s())
            raise YardError(
                ErrorCode.EXHAUSTED,
                f"tenant `{caller.tenant}` has used its quota ({_words(account)}); try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        account.take(prompt_tokens)

    def give_back(self, caller: Caller, prompt_tokens: int) -> None:
        """Of a request that was admitted and then refused for another reason."""
        account = self._account(caller)
        if account is not None and not (self._away and self._without_redis == "allow"):
            account.lent(1, prompt_tokens)

    def charge(self, caller: Caller, tokens: int) -> None:
        """The tokens of an answer that ended."""
        account = self._account(caller)
        if account is not None and not (self._away and self._without_redis == "allow"):
            account.tokens.credit -= tokens

    async def run(self) -> None:
        """Leases, until cancelled."""
        while True:
            self._follow_tenants()
            leased, self._leased = self._leased, None
            try:
                await self._lease()
                self._away = False
            except LOST as error:
                if not self._away:
                    log.warning("quotas cannot be leased (%s); without the store: %s", error, self._without_redis)
                self._away = True
            finally:
                if leased is not None:
                    leased.set_result(None)
            await asyncio.sleep(SHORTEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S if self._accounts else None):
                    await self._wake.wait()
            self._wake.clear()

    def tenants_changed(self) -> None:
        self._wake.set()

    async def _wait_for_lease(self, account: QuotaAccount) -> None:
        """Until a lease that was begun after this call has been answered."""
        if self._leased is None:
            self._leased = asyncio.get_running_loop().create_future()
        self._wake.set()
        account.waiting += 1
        try:
            async with asyncio.timeout(LEASE_WAIT_S):
                await asyncio.shield(self._leased)
        except TimeoutError:
            self._away = True
        finally:
            account.waiting -= 1

    async def _lease(self) -> None:
        self._gateways = max(1, len(self._view.gateways))
        asked = [(tenant, account, wanted) for tenant, account in self._accounts.items() if any(wanted := account.wanted())]
        if not asked:
            if self._away:
                await self._store.redis.ping()
            return
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for tenant, account, wanted in asked:
                self._add(pipe, tenant, account, wanted)
            answers = await pipe.execute()
        for (_, account, _), (requests, tokens) in zip(asked, answers, strict=True):
            account.lent(float(requests), float(tokens))
        self._refilled_s = time.monotonic()

    def _add(self, pipe: Pipeline, tenant: str, account: QuotaAccount, wanted: tuple[float, float]) -> None:
        arguments: list[str | float] = []
        for name, bucket, want in (("requests", account.requests, wanted[0]), ("tokens", account.tokens, wanted[1])):
            arguments += [name, bucket.rate, bucket.capacity, want]
        pipe.eval(self._script, 1, self._store.keys.quota(tenant), *arguments)  # pyright: ignore[reportArgumentType]

    def _refill(self) -> None:
        """What the store would have given since it went away."""
        now_s = time.monotonic()
        since_s, self._refilled_s = now_s - self._refilled_s, now_s
        for account in self._accounts.values():
            account.requests.refill(since_s, self._gateways)
            account.tokens.refill(since_s, self._gateways)

    def _account(self, caller: Caller) -> QuotaAccount | None:
        quota = caller.spec.quota
        if not caller.tenant or (quota.requests_per_s is None and quota.tokens_per_s is None):
            return None
        account = self._accounts.get(caller.tenant)
        if account is None or account.quota != quota:
            account = self._accounts[caller.tenant] = QuotaAccount(quota)
        return account

    def _follow_tenants(self) -> None:
        """Batches are here before the first request comes; those of tenants that are gone are dropped."""
        for tenant in self._accounts.keys() - self._view.tenants.keys():
            del self._accounts[tenant]
        for tenant, spec in self._view.tenants.items():
            self._account(Caller(tenant, spec))


def _words(account: QuotaAccount) -> str:
    quota = account.quota
    parts = [f"{quota.requests_per_s:g} requests/s"] if quota.requests_per_s else []
    parts += [f"{quota.tokens_per_s:g} tokens/s"] if quota.tokens_per_s else []
    return ", ".join(parts)
