"""Who may ask, how much, and in which order: tenants, keys, queues and quotas. Decisions first, then through a whole gateway."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool

from gateway.admission.caller import Caller, identify
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.gate import Gate
from gateway.admission.quota_account import QuotaAccount
from gateway.api.config import QuotaSpec, TenantSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto import inference_pb2 as pb
from gateway.state.view import SiteView


def waiting(tenant: str, number: int, *, weight: float = 100, priority: int = 0, cost: float = 10, since: float = 0.0):
    return Waiting((tenant, number), tenant, weight, priority, cost, since)


def order(queue: FairQueue, now: float = 0.0) -> list[str]:
    found = []
    while (entry := queue.pop(now)) is not None:
        found.append(entry.who[0])
    return found


def test_tenants_share_by_their_weight() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.push(waiting("a", number), 1000)
    for number in range(40):
        queue.push(waiting("b", number, weight=300), 1000)
    first = order(queue)[:40]
    assert (first.count("a"), first.count("b")) == (10, 30)


def test_large_requests_take_more_of_a_share() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.push(waiting("a", number, cost=30), 1000)
        queue.push(waiting("b", number, cost=10), 1000)
    first = order(queue)[:40]
    assert (first.count("a"), first.count("b")) == (10, 30)


def test_a_tenant_that_was_away_does_not_catch_up() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.push(waiting("a", number), 1000)
    for _ in range(50):
        queue.pop(0.0)
    for number in range(50):
        queue.push(waiting("b", number), 1000)
    first = order(queue)[:20]
    assert 9 <= first.count("b") <= 11


def test_a_tenant_that_comes_back_at_once_gains_nothing_by_it() -> None:
    queue = FairQueue()
    queue.push(waiting("a", 0, cost=1000), 10)
    queue.push(waiting("b", 0, cost=10), 10)
    assert queue.pop(0.0).who[0] == "a"  # type: ignore[union-attr]
    queue.push(waiting("a", 1), 10)
    queue.push(waiting("b", 1), 10)
    assert order(queue) == ["b", "b", "a"]


def test_priorities_age_so_that_nobody_waits_for_ever() -> None:
    queue = FairQueue()
    queue.push(waiting("low", 0, priority=0, since=0.0), 10)
    queue.push(waiting("high", 0, priority=50, since=0.0), 10)
    assert queue.pop(1.0).who[0] == "high"  # type: ignore[union-attr]
    queue.push(waiting("high", 1, priority=50, since=10.0), 10)
    assert queue.pop(10.0).who[0] == "low"  # type: ignore[union-attr]


def test_a_full_queue_refuses_whoever_has_most_of_it() -> None:
    queue = FairQueue()
    for number in range(4):
        assert queue.push(waiting("a", number), 4) is None
    refused = queue.push(waiting("b", 0), 4)
    assert refused is not None
    assert refused.who == ("a", 3)
    again = queue.push(waiting("a", 9), 4)
    assert again is not None
    assert again.who == ("a", 9)
    assert len(queue) == 4


async def test_the_gate_lets_through_as_there_is_room_and_refuses_hopeless_waits() -> None:
    """rule 6 and 10: who cannot be served before its deadline is refused at once, with the time to try again."""
    room = {"m": 1}
    gate = Gate(lambda model, inside: room[model] - inside, lambda model: 2)
    loop = asyncio.get_running_loop()

    def enter(deadline: float | None = None, tenant: str = "") -> asyncio.Task:
        return asyncio.create_task(gate.enter("m", Caller(tenant), count=1, cost=1, deadline=deadline))

    first = await enter()
    second, third = enter(), enter()
    await asyncio.sleep(0)
    with pytest.raises(YardError) as full:
        await enter()
    assert full.value.code is ErrorCode.EXHAUSTED
    assert full.value.retry_after_s
    third.cancel()
    await asyncio.wait([third])
    first.leave()
    first.leave()
    ticket = await second
    assert gate.waiting == 0
    gate._models["m"].interval_s = 2.0
    with pytest.raises(YardError, match="the deadline does not allow") as late:
        await enter(deadline=loop.time() + 1)
    assert late.value.code is ErrorCode.EXHAUSTED
    patient = enter(deadline=loop.time() + 10)
    await asyncio.sleep(0)
    assert gate.waiting == 1
    ticket.leave()
    (await patient).leave()


@pytest.mark.parametrize(
    ("interval_s", "coming_s", "retry_s"),
    [
        (0.0, None, 1.0),  # nothing is known
        (0.0, 4.2, 4.2),
        (2.0, None, 6.0),  # two wait, and it itself
        (2.0, 4.2, 4.2),
        (2.0, 10.0, 6.0),
        (2.0, 0.0, 0.1),
        (60.0, 90.0, 30.0),
    ],
)
async def test_who_is_refused_hears_when_the_queue_is_empty_or_another_replica_serves(
    interval_s: float, coming_s: float | None, retry_s: float
) -> None:
    gate = Gate(lambda model, inside: 1 - inside, lambda model: 2, lambda model: coming_s)
    first = await gate.enter("m", Caller(), count=1, cost=1, deadline=None)
    waiting = [asyncio.create_task(gate.enter("m", Caller(), count=1, cost=1, deadline=None)) for _ in range(2)]
    await asyncio.sleep(0)
    gate._models["m"].interval_s = interval_s
    with pytest.raises(YardError, match=f"try again in {retry_s:.1f} s") as full:
        await gate.enter("m", Caller(), count=1, cost=1, deadline=None)
    assert full.value.retry_after_s == pytest.approx(retry_s)
    first.leave()
    for task in waiting:
        (await task).leave()


async def test_whoever_leaves_in_the_moment_it_is_let_through_gives_its_place_back() -> None:
    gate = Gate(lambda model, inside: 1 - inside, lambda model: 9)
    first = await gate.enter("m", Caller(), count=1, cost=1, deadline=None)
    second = asyncio.create_task(gate.enter("m", Caller(), count=1, cost=1, deadline=None))
    await asyncio.sleep(0)
    first.leave()
    second.cancel()
    await asyncio.wait([second])
    (await gate.enter("m", Caller(), count=1, cost=1, deadline=None)).leave()


def test_credit_goes_below_zero_for_answers_and_is_paid_before_more_is_let_through() -> None:
    account = QuotaAccount(QuotaSpec(requests_per_s=10, tokens_per_s=100, burst_s=10))
    assert not account.open
    assert account.wanted() == (5, 50)
    account.lent(5, 50)
    assert account.open
    account.take(30)
    account.tokens.credit -= 60  # the answer
    assert not account.open
    assert account.tokens.wanted(0) == 90
    account.lent(0, 41)
    assert account.open
    assert account.requests.wanted(0) == 0


def table(**tenants: TenantSpec) -> SiteView:
    view = SiteView()
    view.tenants = tenants
    view.key_owners = {digest: name for name, spec in tenants.items() for digest in spec.key_hashes}
    return view


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_say_who_asks() -> None:
    view = table(a=TenantSpec(key_hashes=(digest("k1"), digest("k2")), priority=5), b=TenantSpec())
    caller = identify(view, {"authorization": "Bearer k2", "modelyard-priority": "50"})
    assert (caller.tenant, caller.priority) == ("a", 5)
    assert identify(view, {"authorization": "bearer k1", "modelyard-priority": "-7"}).priority == -7
    refusals = [
        ({}, ErrorCode.UNAUTHENTICATED),
        ({"authorization": "Bearer k3"}, ErrorCode.UNAUTHENTICATED),
        ({"authorization": "Basic k1"}, ErrorCode.UNAUTHENTICATED),
        ({"modelyard-tenant": "b"}, ErrorCode.UNAUTHENTICATED),
        ({"authorization": "Bearer k1", "modelyard-tenant": "b"}, ErrorCode.DENIED),
        ({"authorization": "Bearer k1", "modelyard-priority": "x"}, ErrorCode.INVALID),
    ]
    for headers, code in refusals:
        with pytest.raises(YardError) as caught:
            identify(view, headers)
        assert caught.value.code is code
        assert "k1" not in caught.value.message
        assert "k3" not in caught.value.message


def test_without_keys_tenants_are_known_by_name() -> None:
    view = table(a=TenantSpec())
    assert identify(view, {}).tenant == ""
    assert identify(view, {"modelyard-tenant": "a"}).tenant == "a"
    with pytest.raises(YardError, match="no tenant `z`"):
        identify(view, {"modelyard-tenant": "z"})


# ---------------------------------------------------------------- through a gateway


async def test_keys_are_asked_for_on_every_surface(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 15: no credentials UNAUTHENTICATED/401, not allowed PERMISSION_DENIED/403; health and metrics stay open."""
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "yes"))
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "aliases": ["talk"]})
    lone.put("Tenant", "a", {"key_hashes": [digest("secret-key")], "routes": ["chat"]})
    metadata = (("authorization", "Bearer secret-key"),)
    request = pb.GenerateRequest(model="talk", prompt="x", max_tokens=1)
    assert (await lone.inference.Generate(request, timeout=5, metadata=metadata)).choices[0].text == "yes"
    assert pool.sequences[-1].submit.tenant == "a"
    calls = [
        (lone.inference.Generate(request, timeout=5), grpc.StatusCode.UNAUTHENTICATED),
        (lone.inference.ListModels(pb.ListModelsRequest(), timeout=5), grpc.StatusCode.UNAUTHENTICATED),
        (lone.inference.Tokenize(pb.TokenizeRequest(model="m", text="x"), timeout=5), grpc.StatusCode.UNAUTHENTICATED),
        (
            lone.inference.Generate(pb.GenerateRequest(model="m", prompt="x"), timeout=5, metadata=metadata),
            grpc.StatusCode.PERMISSION_DENIED,
        ),
    ]
    for call, code in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is code
    async with httpx.AsyncClient(base_url=lone.http) as client:
        body = {"model": "chat", "prompt": "x"}
        assert (await client.post("/v1/completions", json=body)).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        allowed = {"authorization": "Bearer secret-key"}
        assert (await client.post("/v1/completions", json=body, headers=allowed)).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "model": "m"}, headers=allowed)).status_code == 403
        assert (await client.get("/health")).status_code == 200
        assert "secret-key" not in (await client.get("/metrics")).text


async def test_a_full_model_answers_with_a_time_to_try_again(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """The pool gets twice what it computes at once; the rest waits here, bounded; RESOURCE_EXHAUSTED and 429 beyond it."""
    lone.put_model("m", concurrency=1, queue=1)
    request = pb.GenerateRequest(model="m", prompt="x", max_tokens=1)
    running = [lone.inference.Generate(request, timeout=10) for _ in range(2)]
    sequences = [await pool.next() for _ in running]
    held = asyncio.ensure_future(lone.inference.Generate(request, timeout=10))
    await until(lambda: lone.path.gate.waiting)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lone.inference.Generate(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert any(key == "retry-after-ms" for key, _ in caught.value.trailing_metadata() or ())
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{lone.http}/v1/completions", json={"model": "m", "prompt": "x"})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert pool.idle()
    for sequence in sequences:
        sequence.end("length", tokens=ids_of(byte_level, "yes"))
    (await pool.next()).end("length", tokens=ids_of(byte_level, "yes"))
    for call in [*running, held]:
        assert (await call).choices[0].text == "yes"


async def test_more_may_wait_while_another_replica_comes(lone: LoneGateway, pool: ScriptedPool) -> None:
    """As many as wait for one that serves, unless it takes so long that whoever waits would better come again."""
    lone.put_model("m", concurrency=1, queue=1)
    other = ScriptedPool("b")
    await other.start()
    request = pb.GenerateRequest(model="m", prompt="x", max_tokens=1)
    running = [asyncio.ensure_future(lone.inference.Generate(request, timeout=10)) for _ in range(2)]
    sequences = [await pool.next() for _ in running]

    async def refused() -> dict[str, str | bytes]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await lone.inference.Generate(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return dict(caught.value.trailing_metadata() or ())

    for ready_in_s, retry_ms in ((90.0, "30000"), (2.5, "2500")):
        lone.observe(other, state="loading", ready_in_s=ready_in_s)
        running.append(asyncio.ensure_future(lone.inference.Generate(request, timeout=10)))
        await until(lambda: lone.path.gate.waiting == len(running) - 2)
        assert (await refused())["retry-after-ms"] == retry_ms
    for sequence in sequences:
        sequence.end("length", tokens=[5])
    for _ in range(2):
        (await pool.next()).end("length", tokens=[5])
    assert {answer.usage.completion_tokens for answer in await asyncio.gather(*running)} == {1}


async def test_rule_10_a_client_that_leaves_the_queue_never_reaches_the_pool(lone: LoneGateway, pool: ScriptedPool) -> None:
    """rule 10"""
    lone.put_model("m", concurrency=1, queue=5)
    request = pb.GenerateRequest(model="m", prompt="x", max_tokens=1)
    running = [lone.inference.Generate(request, timeout=10) for _ in range(2)]
    sequences = [await pool.next() for _ in running]
    leaving = lone.inference.Generate(request, timeout=10)
    call = asyncio.ensure_future(leaving)
    await until(lambda: lone.path.gate.waiting)
    leaving.cancel()
    await until(lambda: not lone.path.gate.waiting)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await lone.inference.Generate(request, timeout=0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not lone.path.gate.waiting)
    await asyncio.wait([call])
    for sequence in sequences:
        sequence.end("length")
    await asyncio.gather(*running)
    assert pool.idle()
    assert lone.path.gate._models["m"].inside == 0


async def test_whoever_the_gate_refuses_has_used_no_quota(lone: LoneGateway, pool: ScriptedPool) -> None:
    lone.put_model("m", concurrency=1, queue=0)

    class Counted:
        balance = 0

        async def admit(self, caller: Caller, prompt_tokens: int) -> None:
            self.balance += prompt_tokens

        def give_back(self, caller: Caller, prompt_tokens: int) -> None:
            self.balance -= prompt_tokens

        def charge(self, caller: Caller, tokens: int) -> None:
            self.balance += tokens

    counted = Counted()
    lone.path.quotas = counted  # type: ignore[assignment]
    request = pb.GenerateRequest(model="m", prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_tokens=2)
    running = [lone.inference.Generate(request, timeout=10) for _ in range(2)]
    sequences = [await pool.next() for _ in running]
    assert counted.balance == 6
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lone.inference.Generate(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert counted.balance == 6
    for sequence in sequences:
        sequence.end("length", tokens=[5, 6])
    await asyncio.gather(*running)
    await until(lambda: counted.balance == 10)


async def test_rule_10_a_deadline_that_has_passed_is_said_to_have_passed(lone: LoneGateway, pool: ScriptedPool) -> None:
    """rule 10: also when the queue is full, or when there is no replica to try."""
    lone.put_model("m", concurrency=1, queue=0)
    request = pb.GenerateRequest(model="m", prompt="x", max_tokens=1)
    running = [lone.inference.Generate(request, timeout=10) for _ in range(2)]
    sequences = [await pool.next() for _ in running]
    # As a gate that knows how long requests take.
    lone.path.gate._models["m"].cost_s = lone.path.gate._models["m"].interval_s = 1.0
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    async with httpx.AsyncClient(base_url=lone.http) as client:
        for milliseconds in ("0", "1"):
            late = await client.post("/v1/completions", json=body, headers={"x-modelyard-timeout-ms": milliseconds})
            assert late.status_code == 504, late.text
        short = await client.post("/v1/completions", json=body, headers={"x-modelyard-timeout-ms": "900"})
        assert short.status_code == 429, short.text
        for sequence in sequences:
            sequence.end("length", tokens=[5])
        await asyncio.gather(*running)
        await pool.stop()
        await lone.wait_up("a", False)
        late = await client.post("/v1/completions", json=body, headers={"x-modelyard-timeout-ms": "50"})
        assert late.status_code == 504, late.text
