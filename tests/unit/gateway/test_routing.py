"""Decisions about where a request goes: pure, so no server and no clock."""

from __future__ import annotations

import random

import pytest

from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import DesiredObject
from gateway.routing.ask import Ask
from gateway.routing.replica_choice import PrefixTable, ReplicaChoice
from gateway.routing.route_table import names, resolve
from gateway.state.snapshot import ObjectKey, Snapshot
from gateway.state.view import SiteView


def view(models: list[str], routes: dict[str, dict]) -> SiteView:
    documents = [("Model", name, {"source": "file:x"}) for name in models]
    documents += [("Route", name, spec) for name, spec in routes.items()]
    objects = {}
    for kind, name, spec in documents:
        manifest = {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        objects[ObjectKey(kind, name)] = DesiredObject(kind, name, 3, 1, manifest, 0.0)
    site = SiteView()
    site.apply_desired(Snapshot(1, objects, {}))
    return site


def targets(*weighted: tuple[str, int], aliases: tuple[str, ...] = ()) -> dict:
    return {"targets": [{"model": model, "weight": weight} for model, weight in weighted], "aliases": list(aliases)}


def test_route_alias_and_own_name() -> None:
    site = view(["m", "n"], {"chat": targets(("m", 100), aliases=("assistant",))})
    for name, route, model in (("chat", "chat", "m"), ("assistant", "chat", "m"), ("n", "n", "n"), ("m", "m", "m")):
        found = resolve(site, name, ready=lambda _: True, ask=Ask(pick=0.5))
        assert (found.route, found.model, found.route_generation) == (route, model, 3)


def test_a_route_hides_the_model_of_its_name() -> None:
    site = view(["m", "n"], {"m": targets(("n", 1))})
    assert resolve(site, "m", ready=lambda _: True, ask=Ask(pick=0.0)).model == "n"
    assert [route.name for route in names(site)] == ["m", "n"]


def test_weights_divide_the_traffic() -> None:
    site = view(["m", "n", "off"], {"chat": targets(("m", 90), ("off", 0), ("n", 10))})
    models = [resolve(site, "chat", ready=lambda _: True, ask=Ask(pick=index / 100)).model for index in range(100)]
    assert (models.count("m"), models.count("n"), models.count("off")) == (90, 10, 0)


def test_a_target_that_is_not_ready_gives_its_traffic_to_the_others() -> None:
    site = view(["m", "n"], {"chat": targets(("m", 1), ("n", 99))})
    assert {resolve(site, "chat", ready=lambda model: model == "m", ask=Ask(pick=index / 10)).model for index in range(10)} == {
        "m"
    }
    # With none ready the weights hold again, and what the model's pool says decides.
    assert resolve(site, "chat", ready=lambda _: False, ask=Ask(pick=0.9)).model == "n"


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (view([], {}), "the site has none yet"),
        (view(["m"], {"chat": targets(("m", 1))}), "there are chat, m"),
        (view([], {"nope": targets(("gone", 1))}), "`gone`, which does not exist"),
    ],
)
def test_unknown_names_say_what_there_is(site: SiteView, message: str) -> None:
    with pytest.raises(YardError, match=message) as caught:
        resolve(site, "nope", ready=lambda _: True, ask=Ask(pick=0.0))
    assert caught.value.code is ErrorCode.NOT_FOUND


class Pool:
    def __init__(self, name: str, tokens: int, groups: int = 1) -> None:
        self.pool, self.tokens, self.groups = name, tokens, groups

    def outstanding_tokens(self, model: str) -> int:
        return self.tokens

    def ready_groups(self, model: str) -> int:
        return self.groups


def test_of_two_the_lighter_takes_it() -> None:
    choice = ReplicaChoice[Pool](random.Random(1))
    heavy, light = Pool("heavy", 1000), Pool("light", 10)
    assert {choice.choose([heavy, light], "m") for _ in range(20)} == {light}
    assert choice.choose([], "m") is None
    assert choice.choose([heavy], "m") is heavy


def test_tokens_are_weighed_per_group() -> None:
    choice = ReplicaChoice[Pool](random.Random(1))
    wide, narrow = Pool("wide", 1000, groups=4), Pool("narrow", 300)
    assert {choice.choose([wide, narrow], "m") for _ in range(20)} == {wide}


def test_many_choices_balance() -> None:
    """Power of two keeps the fullest of many pools close to the mean, which one random choice does not."""
    choice = ReplicaChoice[Pool](random.Random(1))
    pools = [Pool(str(index), 0) for index in range(10)]
    for _ in range(1000):
        taken = choice.choose(pools, "m")
        assert taken is not None
        taken.tokens += 10
    loads = sorted(pool.tokens for pool in pools)
    assert sum(loads) == 10_000
    assert loads[-1] <= 1_060


def test_a_pool_that_has_the_beginning_takes_it_unless_it_is_much_fuller() -> None:
    choice = ReplicaChoice[Pool](random.Random(1))
    pools = [Pool(str(index), 1000) for index in range(8)]
    prompt = list(range(100))
    first = choice.choose(pools, "m", prompt)
    assert first is not None
    # The same beginning, another end; other models and other prompts are spread.
    assert {choice.choose(pools, "m", [*prompt[:70], 7, 7]) for _ in range(20)} == {first}
    assert len({choice.choose(pools, "m", [index] * 20) for index in range(50)}) > 4
    first.tokens = 1000 * 1.5 + 512 + 1
    assert choice.choose(pools, "m", prompt) is not first


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    table = PrefixTable(size=10)
    for index in range(100):
        table.remember(table.keys("m", [index] * 64), "a")
    assert len(table._pools) == 10
    assert table.find(table.keys("m", [99] * 64)) == "a"
    assert table.find(table.keys("m", [0] * 64)) is None
    assert table.keys("m", [1] * 15) == []
