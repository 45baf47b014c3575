"""What Prometheus reads from a gateway: its own requests, the pools as they say they are, and its siblings on the node."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import pytest
from lone_gateway import LoneGateway, ids_of
from prometheus_client.parser import text_string_to_metric_families
from scripted_pool import ScriptedPool

from gateway import ray_metrics
from gateway.api.buckets import SWITCH_BOUNDS_S, Buckets, cumulative
from gateway.api.records import ModelTotals, RankRecord, SwitchRecord
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.node_metrics import NodeMetrics
from gateway.state.view import SiteView

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
MIB = 2**20


def read(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    [found] = [number for (found, mine), number in samples.items() if found == name and set(labels.items()) <= mine]
    return found


async def scrape(lone: LoneGateway) -> Samples:
    async with httpx.AsyncClient() as client:
        return read((await client.get(f"{lone.http}/metrics")).text)


async def test_requests_in_tokens_and_times(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """Rule 16: labels come from the site's objects; made-up names count as `other`."""
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "yes indeed"), cached_tokens=1)
    async with httpx.AsyncClient() as client:
        for model in ("m", "made-up-1", "made-up-2"):
            await client.post(f"{lone.http}/v1/completions", json={"model": model, "prompt": "hello"})
    samples = await scrape(lone)
    assert value(samples, "modelyard_requests_total", route="m", code="ok") == 1
    assert value(samples, "modelyard_requests_total", route="other", code="not_found") == 2
    assert value(samples, "modelyard_cached_tokens_total", model="m") == 1
    answer = value(samples, "modelyard_completion_tokens_total", model="m")
    assert answer == len(ids_of(byte_level, "yes indeed"))
    assert value(samples, "modelyard_first_token_seconds_count", route="m") == 1
    assert value(samples, "modelyard_token_seconds_count", route="m") == 1
    assert not any("made-up" in str(labels) for _, labels in samples)


async def test_pools_as_they_say_they_are(lone: LoneGateway, pool: ScriptedPool) -> None:
    took = Buckets()
    took.add(0.02)
    took.add(700.0)
    rank = RankRecord(
        index=0,
        node="n",
        pid=1,
        device="cuda",
        capacity_bytes=100 * MIB,
        ledger=(("m", "weights", 60 * MIB), ("m", "kv_used", 10 * MIB), ("m", "of a later version", 5 * MIB)),
        utilization=0.5,
        used_bytes=80 * MIB,
        total_bytes=128 * MIB,
        link_bytes_per_s=5e10,
    )
    wake = SwitchRecord("wake", 2, 0.02, 0.02, 700.0, took.total_s, 12 * MIB, 0.9, tuple(took.counts))
    extra = {"ranks": (rank,), "switches": (wake,), "totals": (ModelTotals("m", 100, 40, 7, 1),), "rank_restarts": 3, "held": 2}
    lone.observe(pool, extra=extra)
    samples = await scrape(lone)
    memory = {
        kind: value(samples, "modelyard_pool_memory_bytes", kind=kind) / MIB for kind in ("weights", "kv_used", "foreign", "free")
    }
    assert memory == {"weights": 60, "kv_used": 10, "foreign": 5, "free": 25}
    assert value(samples, "modelyard_device_utilization_ratio", rank="0") == 0.5
    assert value(samples, "modelyard_switch_seconds_bucket", path="wake", le="0.025") == 1
    assert value(samples, "modelyard_switch_seconds_bucket", path="wake", le="+Inf") == 2
    assert value(samples, "modelyard_switch_seconds_sum", path="wake") == took.total_s
    assert value(samples, "modelyard_switch_bytes_total", path="wake") == 12 * MIB
    assert value(samples, "modelyard_switch_link_ratio", path="wake") == 0.9
    assert value(samples, "modelyard_pool_cached_tokens_total") == 40
    assert value(samples, "modelyard_rank_restarts_total") == 3
    assert value(samples, "modelyard_model_groups", model="m", state="ready") == 1
    assert value(samples, "modelyard_pool_up", pool="a") == 1


async def test_a_flipped_route_is_a_switch(lone: LoneGateway) -> None:
    lone.view.subscribe(lone.metrics.route_switches.follow)
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    before = await scrape(lone)
    lone.put("Route", "chat", {"targets": [{"model": "m", "weight": 7}]})
    samples = await scrape(lone)
    assert value(samples, "modelyard_route_flips_total", route="chat") == 1
    counted = [value(found, "modelyard_switch_seconds_count", path="route") for found in (before, samples)]
    assert counted == [0, 1]


async def test_one_scrape_shows_all_gateways_of_a_node(tmp_path: Path) -> None:
    """They share a port, so whichever is asked answers for all; who is gone is left out, and its place is taken again."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for served in (5, 7):
            metrics = GatewayMetrics(SiteView())
            metrics.prompt_tokens.labels("m").inc(served)
            node = NodeMetrics(tmp_path, metrics.registry, metrics.shared)
            await node.start()
            stack.push_async_callback(node.stop)
            nodes.append(node)
        for node in nodes:
            samples = read((await node.text()).decode())
            tokens = {place: value(samples, "modelyard_prompt_tokens_total", gateway=place) for place in "01"}
            assert tokens == {"0": 5, "1": 7}
        assert (await nodes[0].text()).count(b"# TYPE modelyard_prompt_tokens_total counter") == 1
        await nodes[0].stop()
        samples = read((await nodes[1].text()).decode())
        assert not any(("gateway", "0") in labels for _, labels in samples)
        again = NodeMetrics(tmp_path, GatewayMetrics(SiteView()).registry, GatewayMetrics(SiteView()).shared)
        await again.start()
        stack.push_async_callback(again.stop)
        assert again.place == 0


def test_counts_of_an_older_driver_read_as_zeros() -> None:
    assert cumulative(()) == [*((repr(bound), 0.0) for bound in SWITCH_BOUNDS_S), ("+Inf", 0.0)]


class Series:
    """Ray's gauge, of which the process has none without Ray."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name = name
        self.tag_keys = tag_keys
        self.values: dict[frozenset[tuple[str, str]], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values[frozenset(tags.items())] = value


async def test_ray_is_given_the_same_samples(
    lone: LoneGateway, pool: ScriptedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a registry no more is zero in Ray, which forgets nothing."""
    made: list[Series] = []
    monkeypatch.setattr(ray_metrics, "Gauge", lambda *arguments: made.append(Series(*arguments)) or made[-1])
    lone.observe(pool, extra={"ranks": (RankRecord(index=0, node="n", pid=1, device="cpu", capacity_bytes=5),)})
    lone.metrics.requests.labels("grpc", "m", "ok").inc(3)
    node = NodeMetrics(tmp_path, lone.metrics.registry, lone.metrics.shared)
    bridge = ray_metrics.RayMetrics()
    bridge.export(node.families())
    shown = {(series.name, labels): number for series in made for labels, number in series.values.items()}
    assert shown == {key: number for key, number in read((await node.text()).decode()).items() if "_created" not in key[0]}
    assert value(shown, "modelyard_requests_total", gateway="0", route="m") == 3
    lone.forget(pool)
    bridge.export(node.families())
    [capacity] = [series for series in made if series.name == "modelyard_pool_capacity_bytes"]
    assert list(capacity.values.values()) == [0.0]
