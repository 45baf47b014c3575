"""Canaries, rules, stickiness, fallbacks and shadows of routes: decisions first (pure), then through a whole gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from lone_gateway import LoneGateway, ids_of
from pydantic import ValidationError
from scripted_pool import ScriptedPool
from test_routing import view

from gateway.admission.caller import Caller
from gateway.api.config import RouteSpec
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.pool_pb2 import ModelLoad
from gateway.routing.ask import Ask
from gateway.routing.route_table import Resolved, resolve
from gateway.state.view import SiteView

MODELS = ["old", "new", "fast", "precise", "spare"]


def ready(_: str) -> bool:
    return True


def site(**spec: object) -> SiteView:
    return view(MODELS, {"chat": {"targets": [{"model": "old"}], **spec}})


def spread(table: SiteView, asks: list[Ask]) -> list[Resolved]:
    return [resolve(table, "chat", ready=ready, ask=ask) for ask in asks]


def test_a_canary_takes_its_percentage() -> None:
    found = spread(site(canary={"model": "new", "percent": 5}), [Ask(pick=index / 1000) for index in range(1000)])
    assert sum(resolved.model == "new" for resolved in found) == 50
    assert {resolved.why for resolved in found if resolved.model == "new"} == {"canary"}


def test_named_tenants_and_headers_always_get_the_canary() -> None:
    table = site(canary={"model": "new", "tenants": ["pilot"], "headers": {"x-canary": "yes"}})
    asks = [Ask("pilot", pick=0.99), Ask(headers={"x-canary": "yes"}), Ask("other"), Ask(headers={"x-canary": "no"})]
    assert [resolved.model for resolved in spread(table, asks)] == ["new", "new", "old", "old"]


@pytest.mark.parametrize("sticky", ["tenant", "x-session"])
def test_a_sticky_caller_stays_on_its_side_also_when_the_percentage_grows(sticky: str) -> None:
    callers = [f"caller-{index}" for index in range(400)]

    def canaries(percent: float) -> set[str]:
        table = site(canary={"model": "new", "percent": percent}, sticky=sticky)
        found = set()
        for caller in callers:
            asks = [Ask(caller, {"x-session": caller}, pick=pick) for pick in (0.0, 0.5, 0.99)]
            models = {resolved.model for resolved in spread(table, asks)}
            assert len(models) == 1
            found |= {caller for model in models if model == "new"}
        return found

    few, more = canaries(10), canaries(30)
    assert few < more
    assert 20 <= len(few) <= 60
    assert 90 <= len(more) <= 150


def test_routes_choose_different_callers_for_their_canaries() -> None:
    spec = {"targets": [{"model": "old"}], "canary": {"model": "new", "percent": 20}, "sticky": "tenant"}
    table = view(MODELS, {"chat": spec, "risk": spec})
    chosen = [
        {caller for caller in map(str, range(300)) if resolve(table, route, ready=ready, ask=Ask(caller)).model == "new"}
        for route in ("chat", "risk")
    ]
    assert chosen[0] != chosen[1]


def test_without_what_it_is_sticky_by_a_request_is_spread_at_random() -> None:
    table = site(canary={"model": "new", "percent": 50}, sticky="x-session")
    assert [resolved.model for resolved in spread(table, [Ask(pick=0.1), Ask(pick=0.9)])] == ["new", "old"]


def test_weights_stay_what_they_are_beside_a_canary() -> None:
    table = view(
        MODELS,
        {
            "chat": {
                "targets": [{"model": "old", "weight": 3}, {"model": "spare", "weight": 1}],
                "canary": {"model": "new", "percent": 20},
            }
        },
    )
    models = [resolved.model for resolved in spread(table, [Ask(pick=index / 1000) for index in range(1000)])]
    assert [models.count(model) for model in ("new", "old", "spare")] == [200, 600, 200]


RULES = [
    {"model": "precise", "quality": "precise"},
    {"model": "fast", "max_prompt_tokens": 100},
    {"model": "precise", "min_prompt_tokens": 1000},
]


@pytest.mark.parametrize(
    ("ask", "model"),
    [
        (Ask(prompt_tokens=100), "fast"),
        (Ask(prompt_tokens=101), "old"),
        (Ask(prompt_tokens=1000), "precise"),
        (Ask(prompt_tokens=5, quality="precise"), "precise"),
        (Ask(prompt_tokens=500, quality="fast"), "old"),
        (Ask(), "old"),
    ],
)
def test_the_first_rule_that_holds_decides(ask: Ask, model: str) -> None:
    assert spread(site(rules=RULES), [ask])[0].model == model


def test_a_named_canary_goes_before_rules_and_a_percentage_after() -> None:
    table = site(rules=RULES, canary={"model": "new", "percent": 100, "tenants": ["pilot"]})
    asks = [Ask("pilot", prompt_tokens=5), Ask(prompt_tokens=5), Ask(prompt_tokens=500)]
    assert [resolved.model for resolved in spread(table, asks)] == ["new", "fast", "new"]


def test_what_is_not_ready_gives_way() -> None:
    """Another target first, then the fallbacks in their order; with nothing ready the choice stays, to be waited for."""
    table = view(
        MODELS,
        {
            "chat": {
                "targets": [{"model": "old"}, {"model": "new", "weight": 1}],
                "rules": [{"model": "precise", "quality": "precise"}],
                "fallback": ["fast", "spare"],
            }
        },
    )

    def model(*serving: str, quality: str | None = None) -> tuple[str, str]:
        ask = Ask(quality=quality)  # type: ignore[arg-type]
        found = resolve(table, "chat", ready=lambda name: name in serving, ask=ask)
        return found.model, found.why

    assert model("old", "new", "fast") == ("old", "target")
    assert model("new", "fast") == ("new", "target")
    assert model("fast", "spare") == ("fast", "fallback")
    assert model("spare") == ("spare", "fallback")
    assert model() == ("old", "target")
    assert model("old", quality="precise") == ("old", "target")
    assert model("precise", quality="precise") == ("precise", "rule")


def test_those_of_a_target_that_fails_are_spread_over_the_others() -> None:
    table = view(MODELS, {"chat": {"targets": [{"model": "old"}, {"model": "new"}, {"model": "spare"}]}})
    picks = [Ask(pick=index / 3001) for index in range(1000)]
    models = [resolve(table, "chat", ready=lambda name: name != "old", ask=ask).model for ask in picks]
    assert 400 < models.count("new") < 600


def test_a_shadow_is_a_part_of_the_requests_and_never_what_answers() -> None:
    table = site(shadow={"model": "new", "percent": 25})
    found = spread(table, [Ask(shadow_pick=index / 100) for index in range(100)])
    assert {resolved.model for resolved in found} == {"old"}
    assert sum(resolved.shadow == "new" for resolved in found) == 25


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"canary": {"model": "new"}}, "percent, tenants or headers"),
        ({"rules": [{"model": "new"}]}, "needs min_prompt_tokens"),
        ({"rules": [{"model": "new", "min_prompt_tokens": 5, "max_prompt_tokens": 4}]}, "no prompt can fit"),
        ({"shadow": {"model": "old"}}, "is a target"),
        ({"fallback": ["new", "new"]}, "twice"),
        ({"canary": {"model": "new", "headers": {"X-Canary": "1"}}}, "should match pattern"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: dict, message: str) -> None:
    """rule 14"""
    with pytest.raises(ValidationError, match=message):
        RouteSpec.model_validate({"targets": [{"model": "old"}], **spec})


# ---------------------------------------------------------------- through a gateway


@pytest.fixture
async def two(lone: LoneGateway, byte_level: Path) -> ScriptedPool:
    """Beside pool `a` with model `m`, pool `n` with model `n`."""
    lone.texts["n"] = byte_level
    lone.put_model("n")
    second = ScriptedPool("n", ["n"])
    await second.start()
    lone.observe(second)
    await lone.wait_up("n")
    return second


def answering(pool: ScriptedPool, byte_level: Path, text: str) -> None:
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, text))


def prompt(text: str = "x", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="chat", prompt=text, max_tokens=2, **fields)


async def test_long_prompts_go_to_their_model(lone: LoneGateway, pool: ScriptedPool, two: ScriptedPool, byte_level: Path) -> None:
    answering(pool, byte_level, "m")
    answering(two, byte_level, "n")
    rules = [{"model": "n", "min_prompt_tokens": 20}, {"model": "n", "quality": "precise"}]
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "rules": rules})
    assert (await lone.inference.Generate(prompt("short"), timeout=5)).model == "m"
    assert (await lone.inference.Generate(prompt("long " * 30), timeout=5)).model == "n"
    metadata = (("modelyard-quality", "precise"),)
    assert (await lone.inference.Generate(prompt("short"), timeout=5, metadata=metadata)).model == "n"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lone.inference.Generate(prompt(), timeout=5, metadata=(("modelyard-quality", "best"),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_rule_9_before_the_first_token_a_fallback_answers(
    lone: LoneGateway, pool: ScriptedPool, two: ScriptedPool, byte_level: Path
) -> None:
    """rule 9: a target that is lost before the first token costs no request when the route has a fallback; after it, it does."""
    answering(two, byte_level, "n")
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "fallback": ["n"]})
    answer = lone.inference.Generate(prompt(), timeout=10)
    await pool.next()
    pool.drop_links()
    assert (await answer).model == "n"
    await lone.wait_up("a")
    stream = lone.inference.GenerateStream(prompt(), timeout=10)
    sequence = await pool.next()
    sequence.tokens(ids_of(byte_level, "yes")[:1])
    await stream.read()
    pool.drop_links()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class CountedQuotas:
    def __init__(self) -> None:
        self.requests = self.tokens = 0

    async def admit(self, caller: Caller, prompt_tokens: int) -> None:
        self.requests += 1
        self.tokens += prompt_tokens

    def give_back(self, caller: Caller, prompt_tokens: int) -> None:
        self.tokens -= prompt_tokens

    def charge(self, caller: Caller, tokens: int) -> None:
        self.tokens += tokens


async def test_a_shadow_gets_a_copy_of_which_the_caller_sees_nothing(
    lone: LoneGateway, pool: ScriptedPool, two: ScriptedPool, byte_level: Path
) -> None:
    answering(pool, byte_level, "m")
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "shadow": {"model": "n", "concurrency": 1}})
    quotas = lone.path.quotas = CountedQuotas()  # type: ignore[assignment]
    assert (await lone.inference.Generate(prompt("hello", request_id="one"), timeout=5)).choices[0].text == "m"
    copy = await two.next()
    assert copy.submit.shadow
    assert copy.submit.request_id == "shadow-one"
    assert list(copy.submit.prompt_ids) == ids_of(byte_level, "hello")
    # One is under way, so the next is dropped; the caller does not notice.
    assert (await lone.inference.Generate(prompt("hello"), timeout=5)).choices[0].text == "m"
    assert two.idle()
    copy.fail("internal", "broken")
    tasks = {task for running in lone.path.shadows._running.values() for task in running}
    await asyncio.wait(tasks, timeout=5)
    assert not any(lone.path.shadows._running.values())
    assert quotas.requests == 2, "a copy takes of no quota"
    assert quotas.tokens == 2 * len(ids_of(byte_level, "hello") + ids_of(byte_level, "m"))


async def test_a_shadow_is_dropped_while_others_wait_for_its_model(
    lone: LoneGateway, pool: ScriptedPool, two: ScriptedPool, byte_level: Path
) -> None:
    answering(pool, byte_level, "m")
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "shadow": {"model": "n"}})
    link = next(link for link in lone.links.holding("n"))
    link.load.told(ModelLoad(model="n", waiting=1))
    await lone.inference.Generate(prompt(), timeout=5)
    assert two.idle()
