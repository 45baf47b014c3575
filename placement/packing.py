"""Where every worker group of a site belongs: Filter, Score, Reserve, over a snapshot.

1. Keep every placed group that still fits its model's request (sticky: a plan moves nothing without need).
2. Order the models that lack groups by what is hardest to place; the order in which they were added does not matter.
3. For each group: the smallest tensor x pipeline product first; in every pool, the domains whose devices fit (Filter);
   the best of them, away from the model's other groups (Score); all of its ranks or none (Reserve).
4. A model with fewer groups than replicas keeps its reasons, per pool and per device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from placement.footprint import group_footprint
from placement.free_memory import Domain, FreeMemory
from placement.parallelism import degree_problems, degrees
from placement.refusal import refusal
from placement.scoring import Score, balance
from placement.types import ModelRequest, PlacedGroup, Plan, Reason, Snapshot


@dataclass
class _Pool:
    """What the search must know of a pool, beside its free memory."""

    name: str
    kind: str
    devices: int
    largest_domain: int


@dataclass
class _Model:
    request: ModelRequest
    groups: list[PlacedGroup] = field(default_factory=list)
    needs: dict[tuple[int, int, str], tuple[int, ...]] = field(default_factory=dict)

    def stage_bytes(self, tensor_parallel: int, pipeline_parallel: int, kind: str) -> tuple[int, ...]:
        """Bytes on each rank of every stage."""
        key = (tensor_parallel, pipeline_parallel, kind)
        if key not in self.needs:
            self.needs[key] = tuple(stage.total for stage in group_footprint(self.request, *key))
        return self.needs[key]


def place(snapshot: Snapshot, score: Score = balance) -> Plan:
    """Pure and deterministic: equal snapshots give equal plans, in whatever order their parts are listed."""
    return Packer(snapshot, score).plan()


class Packer:
    """One plan in the making."""

    def __init__(self, snapshot: Snapshot, score: Score = balance) -> None:
        self._snapshot = snapshot
        self._score = score
        self._devices = {(device.pool, device.rank): device for device in snapshot.devices}
        self.free = FreeMemory(snapshot.devices)
        self._pools = {name: _pool(name, domains) for name, domains in self.free.pools.items()}
        self._models = {request.name: _Model(request) for request in snapshot.models}

    def plan(self) -> Plan:
        kept, unloads = self._keep()
        loads: list[PlacedGroup] = []
        refusals: dict[str, tuple[Reason, ...]] = {}
        for model in sorted(self._models.values(), key=self._difficulty):
            missing = model.request.replicas - len(model.groups)
            for _ in range(missing):
                group = self.place_one(model.request.name)
                if group is None:
                    refusals[model.request.name] = self.reasons(model.request.name)
                    break
                loads.append(group)
        order = sorted(loads, key=lambda group: (group.model, group.pool, group.ranks))
        return Plan(
            groups=tuple(kept) + tuple(order),
            kept=tuple(kept),
            loads=tuple(order),
            unloads=tuple(unloads),
            refusals={name: refusals[name] for name in sorted(refusals)},
        )

    def place_one(self, name: str) -> PlacedGroup | None:
        """One more group of a model, reserved; None when there is no place, and nothing changed."""
        model = self._models[name]
        request = model.request
        if degree_problems(request):
            return None
        pools = [self._pools[pool] for pool in sorted(self._pools) if _allowed(request, self._pools[pool])]
        tried: dict[tuple[int, int], list[_Pool]] = defaultdict(list)
        for pool in pools:
            for pair in degrees(request, pool.kind, pool.largest_domain, pool.devices):
                tried[pair].append(pool)
        preference = {pair: (pair[0] * pair[1], index) for index, pair in enumerate(tried)}
        for pair in sorted(tried, key=preference.__getitem__):
            found = self._best(model, *pair, tried[pair])
            if found is not None:
                sizes = model.stage_bytes(*pair, self._pools[found[0]].kind)
                group = PlacedGroup(name, found[0], found[1], *pair, tuple(size for size in sizes for _ in range(pair[0])))
                if not self.free.reserve(group.pool, group.ranks, group.bytes_per_rank):
                    raise AssertionError(f"model {name}: the search chose ranks without room: {group}")
                model.groups.append(group)
                return group
        return None

    def reasons(self, name: str) -> tuple[Reason, ...]:
        model = self._models[name]
        needs = {
            pool.name: {
                pair: model.stage_bytes(*pair, pool.kind)
                for pair in degrees(model.request, pool.kind, pool.largest_domain, pool.devices)
            }
            for pool in self._pools.values()
            if _allowed(model.request, pool)
        }
        return refusal(model.request, len(model.groups), self._snapshot.devices, self.free, needs)

    def _best(self, model: _Model, tensor: int, pipeline: int, pools: list[_Pool]) -> tuple[str, tuple[int, ...]] | None:
        """(pool, ranks stage-major) with the lowest score."""
        used_nodes = {self._devices[group.pool, rank].node for group in model.groups for rank in group.ranks}
        used_pools = {group.pool for group in model.groups}
        best = None
        for pool in pools:
            sizes = model.stage_bytes(tensor, pipeline, pool.kind)
            found = self._in_pool(pool, tensor, sizes, used_nodes)
            if found is None:
                continue
            shared_nodes, score, ranks = found
            key = (shared_nodes, pool.name in used_pools, score, pool.name, ranks)
            if best is None or key < best:
                best = key
        return None if best is None else (best[3], best[4])

    def _in_pool(
        self, pool: _Pool, tensor: int, sizes: tuple[int, ...], used_nodes: set[str]
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """(stages on nodes that already hold this model, score, ranks) of the best place in one pool."""
        domains = self.free.pools[pool.name]
        if len(sizes) == 1:
            best = None
            for domain in domains:
                if domain.fitting(sizes[0]) < tensor:
                    continue
                score, first = self._score(domain, sizes[0], tensor)
                key = (int(domain.key[1] in used_nodes), score, domain.key)
                if best is None or key < best[0]:
                    best = (key, domain, first)
            if best is None:
                return None
            (shared, score, _), domain, first = best
            return shared, score, tuple(sorted(-rank for _, rank in domain.free[first : first + tensor]))
        return self._stages_in_pool(domains, tensor, sizes, used_nodes)

    def _stages_in_pool(
        self, domains: list[Domain], tensor: int, sizes: tuple[int, ...], used_nodes: set[str]
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Stages one by one, the largest first, on ranks of their own; neighbours stay on a node where there is room."""
        open_domains = [Domain(domain.key, domain.kind, list(domain.free)) for domain in domains]
        chosen: dict[int, tuple[int, ...]] = {}
        home: set[tuple[str, str, str]] = set()
        shared = total = 0
        for stage in sorted(range(len(sizes)), key=lambda stage: (-sizes[stage], stage)):
            best = None
            for domain in open_domains:
                if domain.fitting(sizes[stage]) < tensor:
                    continue
                score, first = self._score(domain, sizes[stage], tensor)
                key = (domain.key not in home, domain.key[1] in used_nodes, score, domain.key)
                if best is None or key < best[0]:
                    best = (key, domain, first)
            if best is None:
                return None
            (_, is_shared, score, key), domain, first = best
            chosen[stage] = tuple(sorted(-rank for _, rank in domain.free[first : first + tensor]))
            del domain.free[first : first + tensor]
            home.add(key)
            shared, total = shared + int(is_shared), total + score
        return shared, total, tuple(rank for stage in range(len(sizes)) for rank in chosen[stage])

    def _keep(self) -> tuple[list[PlacedGroup], list[PlacedGroup]]:
        """Reserve what stays; what does not is unloaded, with every group of a model that is no longer asked for."""
        kept, unloads = [], []
        for group in sorted(self._snapshot.placed, key=self._keeping_order):
            model = self._models.get(group.model)
            fits = model is not None and len(model.groups) < model.request.replicas and self._still_right(group, model.request)
            if model is not None and fits and self.free.reserve(group.pool, group.ranks, group.bytes_per_rank):
                model.groups.append(group)
                kept.append(group)
            else:
                unloads.append(group)
        order = _by_place
        return sorted(kept, key=order), sorted(unloads, key=order)

    def _keeping_order(self, group: PlacedGroup) -> tuple:
        """Pinned and important models first: where a device shrank, others make room."""
        model = self._models.get(group.model)
        rank = (not model.request.pinned, -model.request.priority) if model else (True, 0)
        return (*rank, *_by_place(group))

    def _still_right(self, group: PlacedGroup, request: ModelRequest) -> bool:
        devices = [self._devices.get((group.pool, rank)) for rank in group.ranks]
        return (
            all(device is not None and _kind_allowed(request, device.kind) for device in devices)
            and (not request.pools or group.pool in request.pools)
            and request.tensor_parallel in (None, group.tensor_parallel)
            and request.pipeline_parallel in (None, group.pipeline_parallel)
        )

    def _difficulty(self, model: _Model) -> tuple:
        request = model.request
        return (-request.priority, not request.pinned, -sum(model.stage_bytes(1, 1, request.device or "cpu")), request.name)


def _pool(name: str, domains: list[Domain]) -> _Pool:
    sizes = [len(domain.free) for domain in domains]
    return _Pool(name, domains[0].kind, sum(sizes), max(sizes))


def _allowed(request: ModelRequest, pool: _Pool) -> bool:
    return (not request.pools or pool.name in request.pools) and _kind_allowed(request, pool.kind)


def _kind_allowed(request: ModelRequest, kind: str) -> bool:
    return request.device is None or request.device == kind


def _by_place(group: PlacedGroup) -> tuple:
    return (group.model, group.pool, group.ranks)
