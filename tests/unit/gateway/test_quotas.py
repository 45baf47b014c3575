"""Quotas over several gateways of one site, leased from a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from lone_gateway import until
from valkey_server import ValkeyServer

from gateway.admission.caller import Caller
from gateway.admission.quotas import Quotas
from gateway.api.config import QuotaSpec, TenantSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import GatewayRecord
from gateway.api.tasks import cancelled
from gateway.state.store import SiteStore
from gateway.state.view import SiteView

Make = Callable[..., Awaitable[Quotas]]
GATEWAY = GatewayRecord("g", "n", 1, "", "", 1, 0.0)


@pytest.fixture
async def make(own_valkey: ValkeyServer, site: str) -> AsyncIterator[Make]:
    tasks: list[asyncio.Task] = []
    stores: list[SiteStore] = []

    async def start(spec: TenantSpec, without_redis: str = "last") -> Quotas:
        store = SiteStore(own_valkey.url, site)
        view = SiteView()
        view.tenants = {"a": spec}
        view.gateways = {"g": GATEWAY, "h": GATEWAY}
        quotas = Quotas(view, store, without_redis)  # type: ignore[arg-type]
        tasks.append(asyncio.create_task(quotas.run()))
        stores.append(store)
        return quotas

    yield start
    await cancelled(tasks)
    for store in stores:
        await store.close()


async def admitted(quotas: Quotas, caller: Caller, count: int, tokens: int = 0) -> int:
    """Of so many requests at once."""
    results = await asyncio.gather(*(quotas.admit(caller, tokens) for _ in range(count)), return_exceptions=True)
    for result in results:
        assert result is None or (isinstance(result, YardError) and result.code in (ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE))
    return sum(result is None for result in results)


def caller(**quota: float) -> Caller:
    return Caller("a", TenantSpec(quota=QuotaSpec(**quota)))


async def test_a_quota_is_one_over_all_gateways(make: Make) -> None:
    """However the requests spread, no more pass than the site gives: the burst, and what comes meanwhile."""
    who = caller(requests_per_s=1, burst_s=60)
    gateways = [await make(who.spec) for _ in range(3)]
    passed = await asyncio.gather(*(admitted(quotas, who, 50) for quotas in gateways))
    assert 57 <= sum(passed) <= 63  # a gateway may hold the credit of a request that it did not get
    results = await asyncio.gather(*(gateways[0].admit(who, 0) for _ in range(5)), return_exceptions=True)
    refusal = results[-1]
    assert isinstance(refusal, YardError)
    assert refusal.code is ErrorCode.EXHAUSTED
    assert refusal.retry_after_s
    assert "1 requests/s" in refusal.message


async def test_a_burst_that_the_site_has_passes_at_one_gateway(make: Make) -> None:
    who = caller(requests_per_s=10, burst_s=10)
    quotas = await make(who.spec)
    assert await admitted(quotas, who, 100) >= 99


async def test_tokens_count_prompts_and_answers(make: Make) -> None:
    who = caller(tokens_per_s=1, burst_s=100)
    quotas = await make(who.spec)
    await quotas.admit(who, 60)
    quotas.charge(who, 60)
    with pytest.raises(YardError) as caught:
        await quotas.admit(who, 1)
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert 15 <= (caught.value.retry_after_s or 0) <= 25


async def test_no_call_to_redis_with_credit_at_hand(make: Make, own_valkey: ValkeyServer) -> None:
    who = caller(requests_per_s=100)
    quotas = await make(who.spec)
    await quotas.admit(who, 0)
    own_valkey.pause()
    began = asyncio.get_running_loop().time()
    for _ in range(20):
        await quotas.admit(who, 0)
    assert asyncio.get_running_loop().time() - began < 0.05
    own_valkey.resume()


@pytest.mark.parametrize("policy", ["allow", "deny", "last"])
@pytest.mark.parametrize("how", ["stopped", "hanging"])
async def test_rule_12_without_redis_quotas_do_what_the_site_says(
    make: Make, own_valkey: ValkeyServer, policy: str, how: str
) -> None:
    """rule 12"""
    who = caller(requests_per_s=20, burst_s=1)
    quotas = await make(who.spec, policy)
    await quotas.admit(who, 0)
    if how == "stopped":
        own_valkey.stop()
    else:
        own_valkey.pause()
    await admitted(quotas, who, 30)  # takes what is left, and finds out
    passed = await admitted(quotas, who, 100)
    if policy == "allow":
        assert passed == 100
    elif policy == "deny":
        assert passed == 0
    else:
        assert passed <= 10
        # Two gateways share 20 a second, so this one gives 10; a batch holds what half a second of the quota gives.
        await asyncio.sleep(0.6)
        assert 4 <= await admitted(quotas, who, 100) <= 10
    if how == "stopped":
        own_valkey.start()
    else:
        own_valkey.resume()
    await until(lambda: not quotas._away)
    assert 1 <= await admitted(quotas, who, 100) <= 40
