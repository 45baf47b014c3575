"""What pools say of themselves in their heartbeats, as Prometheus reads it.

Every gateway shows the same pools, so queries take one of them: `max by (pool, …) (…)`. Labels come from the site's own objects
and from fixed lists (rule 16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.api.buckets import Buckets, cumulative
from gateway.api.records import ModelState, PoolRecord, RankRecord
from gateway.state.view import SiteView

MEMORY_KINDS = ("weights", "kv_floor", "kv_used", "workspace", "communication", "grammar", "context", "foreign")
_STATES = get_args(ModelState)


def memory_by_kind(rank: RankRecord) -> dict[str, int]:
    """Bytes of its ledger, all kinds and what is free. What has no known kind counts as foreign."""
    sums: dict[str, int] = dict.fromkeys((*MEMORY_KINDS, "free"), 0)
    for _, kind, size in rank.ledger:
        sums[kind if kind in MEMORY_KINDS else "foreign"] += size
    sums["free"] = max(rank.capacity_bytes - sum(sums.values()), 0)
    return sums


class PoolMetrics(Collector):
    """`route_switches`: what flipped routes took until this gateway used them, path `route` of the switches."""

    def __init__(self, view: SiteView, route_switches: Buckets) -> None:
        self._view = view
        self._route_switches = route_switches

    def collect(self) -> Iterator[Metric]:
        pools = [self._view.pools[name] for name in sorted(self._view.pools)]
        yield from _memory(pools)
        yield from _devices(pools)
        yield from self._models(pools)
        yield from _totals(pools)
        yield from self._switches(pools)
        yield from self._site(pools)

    def _models(self, pools: list[PoolRecord]) -> Iterator[Metric]:
        groups = GaugeMetricFamily("modelyard_model_groups", "Worker groups, by state.", labels=("pool", "model", "state"))
        running = GaugeMetricFamily("modelyard_pool_running", "Sequences being computed.", labels=("pool", "model"))
        waiting = GaugeMetricFamily("modelyard_pool_waiting", "Sequences that wait in the pool.", labels=("pool", "model"))
        standby = GaugeMetricFamily(
            "modelyard_standby_bytes", "Weights of parked models outside the pool's memory.", labels=("pool", "model")
        )
        kv = GaugeMetricFamily("modelyard_kv_bytes", "KV memory, by what it is doing.", labels=("pool", "model", "use"))
        for pool in pools:
            for model in sorted({group.model for group in pool.groups}):
                mine = [group for group in pool.groups if group.model == model]
                states = Counter(group.state for group in mine)
                for state in _STATES:
                    groups.add_metric((pool.pool, model, state), states[state])
                running.add_metric((pool.pool, model), sum(group.running for group in mine))
                waiting.add_metric((pool.pool, model), sum(group.waiting for group in mine))
                standby.add_metric((pool.pool, model), sum(group.standby_bytes for group in mine))
                mapped, used, holes = (
                    sum(getattr(group, name) for group in mine) for name in ("kv_bytes", "kv_used_bytes", "kv_hole_bytes")
                )
                for use, size in (("used", used), ("holes", holes), ("ready", mapped - used - holes)):
                    kv.add_metric((pool.pool, model, use), max(size, 0))
        yield from (groups, running, waiting, standby, kv)

    def _switches(self, pools: list[PoolRecord]) -> Iterator[Metric]:
        took = HistogramMetricFamily(
            "modelyard_switch_seconds", "What bringing a model in took, by path.", labels=("pool", "path")
        )
        moved = CounterMetricFamily("modelyard_switch_bytes", "Bytes that switches moved.", labels=("pool", "path"))
        share = GaugeMetricFamily(
            "modelyard_switch_link_ratio", "Speed of the last one against what the link can do.", labels=("pool", "path")
        )
        route = self._route_switches
        took.add_metric(("", "route"), cumulative(route.counts), route.total_s)
        for pool in pools:
            for switch in pool.switches:
                labels = (pool.pool, switch.path)
                took.add_metric(labels, cumulative(switch.buckets), switch.total_s)
                moved.add_metric(labels, switch.bytes, created=pool.started_unix or None)
                if switch.link_share:
                    share.add_metric(labels, switch.link_share)
        yield from (took, moved, share)

    def _site(self, pools: list[PoolRecord]) -> Iterator[Metric]:
        view = self._view
        up = GaugeMetricFamily(
            "modelyard_pool_up", "1 while the pool's driver answers and all its ranks are there.", labels=("pool",)
        )
        alive = {pool.pool: not pool.message and all(rank.alive for rank in pool.ranks) for pool in pools}
        for name in sorted({*view.desired_pools, *alive}):
            up.add_metric((name,), alive.get(name, False))
        unplaced = GaugeMetricFamily("modelyard_unplaced_models", "Models of which a replica is nowhere.")
        unplaced.add_metric((), len(view.controller.unplaced) if view.controller else 0)
        controller = GaugeMetricFamily("modelyard_controller_up", "1 while a controller holds the site's lease.")
        controller.add_metric((), view.controller is not None)
        yield from (up, unplaced, controller)


def _memory(pools: list[PoolRecord]) -> Iterator[Metric]:
    memory = GaugeMetricFamily("modelyard_pool_memory_bytes", "The pool's ledger.", labels=("pool", "rank", "kind"))
    capacity = GaugeMetricFamily("modelyard_pool_capacity_bytes", "What the ledger may hold.", labels=("pool", "rank"))
    fragmentation = GaugeMetricFamily(
        "modelyard_kv_fragmentation_ratio",
        "KV memory that is not in use and cannot be given back, of all mapped.",
        labels=("pool",),
    )
    for pool in pools:
        for rank in pool.ranks:
            labels = (pool.pool, str(rank.index))
            capacity.add_metric(labels, rank.capacity_bytes)
            for kind, size in memory_by_kind(rank).items():
                memory.add_metric((*labels, kind), size)
        mapped = sum(group.kv_bytes for group in pool.groups)
        fragmentation.add_metric((pool.pool,), sum(group.kv_hole_bytes for group in pool.groups) / mapped if mapped else 0.0)
    yield from (memory, capacity, fragmentation)


def _devices(pools: list[PoolRecord]) -> Iterator[Metric]:
    labels = ("pool", "rank", "device")
    use = GaugeMetricFamily("modelyard_device_utilization_ratio", "How busy the device is.", labels=labels)
    used = GaugeMetricFamily("modelyard_device_used_bytes", "Memory in use on the device, by whomever.", labels=labels)
    total = GaugeMetricFamily("modelyard_device_total_bytes", "Memory of the device.", labels=labels)
    link = GaugeMetricFamily("modelyard_link_bytes_per_second", "Host memory to device, as measured.", labels=labels)
    for pool in pools:
        for rank in pool.ranks:
            mine = (pool.pool, str(rank.index), rank.device)
            if rank.utilization >= 0:
                use.add_metric(mine, rank.utilization)
            if rank.total_bytes:
                used.add_metric(mine, rank.used_bytes)
                total.add_metric(mine, rank.total_bytes)
            if rank.link_bytes_per_s:
                link.add_metric(mine, rank.link_bytes_per_s)
    yield from (use, used, total, link)


def _totals(pools: list[PoolRecord]) -> Iterator[Metric]:
    labels = ("pool", "model")
    prompt = CounterMetricFamily("modelyard_pool_prompt_tokens", "Prompt tokens of sequences that ended.", labels=labels)
    cached = CounterMetricFamily("modelyard_pool_cached_tokens", "Of those, not computed: their KV was there.", labels=labels)
    answer = CounterMetricFamily("modelyard_pool_completion_tokens", "Generated tokens.", labels=labels)
    failed = CounterMetricFamily("modelyard_pool_failed", "Sequences that ended with an error.", labels=labels)
    restarts = CounterMetricFamily("modelyard_rank_restarts", "Times that all ranks of the pool began anew.", labels=("pool",))
    steps = CounterMetricFamily("modelyard_pool_steps", "Steps computed.", labels=("pool",))
    held = GaugeMetricFamily("modelyard_pool_held", "Requests that wait for their model to come in.", labels=("pool",))
    for pool in pools:
        for total in pool.totals:
            mine = (pool.pool, total.model)
            prompt.add_metric(mine, total.prompt_tokens)
            cached.add_metric(mine, total.cached_tokens)
            answer.add_metric(mine, total.completion_tokens)
            failed.add_metric(mine, total.failed)
        restarts.add_metric((pool.pool,), pool.rank_restarts)
        steps.add_metric((pool.pool,), pool.steps)
        held.add_metric((pool.pool,), pool.held)
    yield from (prompt, cached, answer, failed, restarts, steps, held)
