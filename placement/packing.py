"""Where every worker group of a site belongs: Filter, Score, Reserve, over a snapshot.

1. Keep every placed group that still fits its model's request (sticky: a plan moves nothing without need) and shares no
   device with another one of its model.
2. Order the models that lack groups by what is hardest to place; the order in which they were added does not matter.
3. For each group: the smallest tensor x pipeline product first; the domains whose devices fit, hold no other group of the
   model and are fast enough for its SLO (Filter); the best of them, away from the model's other groups, and where a load is
   expected on devices that it does not crowd, if there are any (Score); all of its ranks or none (Reserve).
4. A group that finds no memory beside the others is placed where it takes turns with them, if host memory has room for what
   stands by, and the model is not pinned.
5. A model with fewer groups than replicas keeps its reasons, per pool and per device; one whose groups cannot carry its
   expected load has a note.
"""

from __future__ import annotations

from dataclasses import replace

from placement.candidate import Candidate, Order, total_bytes
from placement.free_memory import Domain, FreeMemory
from placement.load import BusyDevices, load_notes, share_of
from placement.parallelism import degree_problems, degrees
from placement.pools import PoolFacts, Pools
from placement.refusal import DEVICES_LISTED, refusal
from placement.remedies import remedies
from placement.replicas import Replicas
from placement.scoring import BALANCE, Policy, Spot
from placement.stages import place_stages
from placement.standby import StandbyMemory
from placement.types import ModelRequest, PlacedGroup, Plan, Reason, Snapshot


def place(snapshot: Snapshot, policy: Policy = BALANCE) -> Plan:
    """Pure and deterministic: equal snapshots give equal plans, in whatever order their parts are listed."""
    return Packer(snapshot, policy).plan()


class Packer:
    """One plan in the making; afterwards `place_one` adds to it what comes later."""

    def __init__(self, snapshot: Snapshot, policy: Policy = BALANCE) -> None:
        self._snapshot = snapshot
        self._policy = policy
        self._devices = {(device.pool, device.rank): device for device in snapshot.devices}
        self.free = FreeMemory(snapshot.devices)
        self.busy = BusyDevices()
        self._standby = StandbyMemory(snapshot.devices)
        self._pools = Pools(self.free.pools, snapshot.devices)
        self._models = {request.name: Candidate(request) for request in snapshot.models}

    def plan(self, order: Order | None = None) -> Plan:
        """`order` is of models of equal priority; by default the most bytes first."""
        kept, unloads = self._keep()
        for device in self._snapshot.devices:
            self.free.withhold(device.pool, device.rank, device.unaccounted_bytes)
        loads: list[PlacedGroup] = []
        refusals: dict[str, tuple[Reason, ...]] = {}
        lacking = [model for model in self._models.values() if model.placed < model.request.replicas]
        lacking.sort(key=lambda model: model.difficulty(order or total_bytes))
        for search in (self._search_own, self._search_standby):  # memory of their own for all, before any takes turns
            for model in lacking:
                while model.placed < model.request.replicas and (group := search(model)) is not None:
                    self._enter(model, group)
                    loads.append(group)
        for model in lacking:
            if model.placed < model.request.replicas:
                refusals[model.request.name] = self.reasons(model.request)
        loads.sort(key=_by_place)
        return Plan(
            groups=tuple(kept) + tuple(loads),
            kept=tuple(kept),
            loads=tuple(loads),
            unloads=tuple(unloads),
            refusals={name: refusals[name] for name in sorted(refusals)},
            notes=load_notes(self._snapshot.models, self._devices, (*kept, *loads)),
        )

    def place_one(self, request: ModelRequest) -> PlacedGroup | None:
        """One more group of a model, reserved; None when there is no place, and nothing changed."""
        model = self._models.setdefault(request.name, Candidate(request))
        group = self._search_own(model) or self._search_standby(model)
        if group is not None:
            self._enter(model, group)
        return group

    def _enter(self, model: Candidate, group: PlacedGroup) -> None:
        if not self._reserve(group):
            raise AssertionError(f"model {group.model}: the search chose ranks without room: {group}")
        self._add(model, group)

    def _reserve(self, group: PlacedGroup) -> bool:
        """All of its ranks or none."""
        if group.standby:
            return self._standby.reserve(group)
        return self.free.reserve(group.pool, group.ranks, group.bytes_per_rank)

    def fits(self, request: ModelRequest) -> bool:
        """Whether `place_one` would find a place; nothing is reserved."""
        known = self._models.get(request.name)
        return self._search(Candidate(request, known.replicas if known else Replicas())) is not None

    def _degrees(self, request: ModelRequest) -> list[tuple[tuple[int, int], str]]:
        """((tensor, pipeline), kind of device) in the order to try them."""
        if degree_problems(request):
            return []
        pairs = [
            (pair, kind)
            for kind, bounds in sorted(self._pools.bounds.items())
            if request.device in (None, kind)
            for pair in degrees(request, kind, *bounds)
        ]
        return sorted(pairs, key=lambda entry: entry[0][0] * entry[0][1])  # stable: the kind's own preference stays

    def _search_own(self, model: Candidate) -> PlacedGroup | None:
        """A place with memory of its own that leaves what takes turns there its turn."""
        if not self._standby.exists:
            return self._search(model)
        able = Candidate(model.request, model.replicas.copy(), sizes=model.sizes, slow=model.slow)
        while (group := self._search(able)) is not None:
            harmed = self._standby.harmed(group, pinned=model.request.pinned)
            if not harmed:
                return group
            able.replicas.bar(group.pool, harmed, filter(None, (self.free.domain(group.pool, rank) for rank in harmed)))
        return None

    def _search_standby(self, model: Candidate) -> PlacedGroup | None:
        """A place where it takes turns with others; see `placement.standby`."""
        if model.request.pinned or not self._standby.exists:
            return None
        for (tensor, pipeline), kind in self._degrees(model.request):
            sizes = model.stage_bytes(tensor, pipeline, kind)
            each = tuple(size for size in sizes for _ in range(tensor))
            found: list[tuple[int, PlacedGroup]] = []
            for pool in self._pools.candidates(model.request, kind):
                able = self._able(model, tensor, pipeline, pool, uncrowded=False)
                spot = self._standby.find(able, tensor, sizes, model.replicas.ranks.get(pool.name, ()))
                if spot is not None:
                    group = PlacedGroup(model.request.name, pool.name, spot[0], tensor, pipeline, each, standby=True)
                    found.append((spot[1], group))
            for _, group in sorted(found, key=lambda entry: (entry[0], entry[1].pool)):
                if self._standby.would_fit(group):
                    return group
        return None

    def _search(self, model: Candidate) -> PlacedGroup | None:
        request = model.request
        for (tensor, pipeline), kind in self._degrees(request):
            found = self._find(model, tensor, pipeline, kind)
            if found is not None:
                sizes = model.stage_bytes(tensor, pipeline, kind)
                each = tuple(size for size in sizes for _ in range(tensor))
                return PlacedGroup(request.name, *found, tensor, pipeline, each)
        return None

    def reasons(self, request: ModelRequest) -> tuple[Reason, ...]:
        """Why `place_one` found no place."""
        model = self._models[request.name]
        needs = {
            pool.name: {
                pair: model.stage_bytes(*pair, pool.kind)
                for pair in degrees(request, pool.kind, pool.largest_domain, pool.devices)
            }
            for pool in self._pools
            if pool.allows(request)
        }
        blocked = {
            name for name in needs if name in model.replicas.ranks and self._search(Candidate(replace(request, pools=(name,))))
        }
        slow = {
            name: [model.slo_problem(*pair, domain) for pair in needs[name] for domain in self.free.pools[name]] for name in needs
        }
        reasons = refusal(request, model.placed, self._snapshot.devices, self.free, needs, model.replicas, blocked, slow)
        if len(self._devices) > DEVICES_LISTED:
            return reasons
        return reasons + remedies(request, self.fits)

    def _find(self, model: Candidate, tensor: int, pipeline: int, kind: str) -> tuple[str, tuple[int, ...]] | None:
        """(pool, ranks stage-major) of the best place for one group."""
        sizes = model.stage_bytes(tensor, pipeline, kind)
        ranking = self.free.ranking(kind, tensor)
        if not ranking or ranking[-1][0] < min(sizes):
            return None
        if model.request.load is not None:
            found = self._find_among(model, tensor, pipeline, kind, sizes, uncrowded=True)
            if found is not None:
                return found
        return self._find_among(model, tensor, pipeline, kind, sizes, uncrowded=False)

    def _find_among(
        self, model: Candidate, tensor: int, pipeline: int, kind: str, sizes: tuple[int, ...], *, uncrowded: bool
    ) -> tuple[str, tuple[int, ...]] | None:
        if pipeline == 1:
            spot = self._one_stage(model, tensor, sizes[0], kind, uncrowded=uncrowded)
            return None if spot is None else (spot.domain.key[0], spot.ranks)
        best, replicas = None, model.replicas
        for pool in self._pools.candidates(model.request, kind):
            able = self._able(model, tensor, pipeline, pool, uncrowded=uncrowded)
            domains = [replicas.rest(domain) for domain in able]
            found = place_stages(domains, tensor, sizes, self._policy, replicas.closeness)
            if found is not None and (best is None or (found.score, pool.name) < best[0]):
                best = ((found.score, pool.name), found.ranks)
        return None if best is None else (best[0][1], best[1])

    def _able(self, model: Candidate, tensor: int, pipeline: int, pool: PoolFacts, *, uncrowded: bool) -> list[Domain]:
        """Domains of the pool that are fast enough for the model; of these the devices that it does not crowd."""
        able = [domain for domain in self.free.pools[pool.name] if not model.slo_problem(tensor, pipeline, domain)]
        if not uncrowded:
            return able
        rest = []
        for domain in able:
            share = share_of(model.request, tensor, pipeline, domain.kind, domain.type)
            crowded = self.busy.crowded_with(pool.name, share)
            rest.append(domain.without(crowded) if crowded else domain)
        return rest

    def _one_stage(self, model: Candidate, tensor: int, need_bytes: int, kind: str, *, uncrowded: bool) -> Spot | None:
        """The best spot that is farthest from the model's other groups and shares no device with them."""
        request, replicas = model.request, model.replicas
        if self._pools.is_choosy(request):
            domains = [
                domain
                for pool in self._pools.candidates(request, kind)
                for domain in self._able(model, tensor, 1, pool, uncrowded=uncrowded)
            ]
            spots = iter(self._policy.among(domains, tensor, need_bytes))
        else:
            spots = self._policy.everywhere(self.free, kind, tensor, need_bytes, replicas.closeness)
        return replicas.farthest(spots, self._policy, tensor, need_bytes)

    def _keep(self) -> tuple[list[PlacedGroup], list[PlacedGroup]]:
        """Reserve what stays; what does not is unloaded, with every group of a model that is no longer asked for."""
        kept, unloads = [], []
        for group in sorted(self._snapshot.placed, key=self._keeping_order):
            model = self._models.get(group.model)
            stays = (
                model is not None
                and model.placed < model.request.replicas
                and not model.replicas.overlap(group)
                and self._still_right(group, model.request)
            )
            kept_as = None
            if model is not None and stays:
                # One that took turns gets memory of its own where there is room by now.
                ways = [replace(group, standby=False), group] if group.standby else [group]
                pinned = model.request.pinned
                kept_as = next(
                    (way for way in ways if (way.standby or not self._standby.harmed(way, pinned=pinned)) and self._reserve(way)),
                    None,
                )
            if model is not None and kept_as is not None:
                self._add(model, kept_as)
                kept.append(kept_as)
            else:
                unloads.append(group)
        return sorted(kept, key=_by_place), sorted(unloads, key=_by_place)

    def _add(self, model: Candidate, group: PlacedGroup) -> None:
        """A group that has been reserved."""
        domains = (self.free.domain(group.pool, rank) for rank in group.ranks)
        known = {domain for domain in domains if domain is not None}
        model.replicas.add(group, known)
        model.placed += 1
        if not group.standby:
            self._standby.add_resident(group, pinned=model.request.pinned)
        if model.request.load is not None and known:
            kind, type_ = next((domain.kind, domain.type) for domain in known)
            degrees_ = (group.tensor_parallel, group.pipeline_parallel)
            self.busy.add(group.pool, group.ranks, share_of(model.request, *degrees_, kind, type_))

    def _keeping_order(self, group: PlacedGroup) -> tuple:
        """Pinned and important models first: where a device shrank, others make room. Those that take turns come last."""
        model = self._models.get(group.model)
        rank = (not model.request.pinned, -model.request.priority) if model else (True, 0)
        return (group.standby, *rank, *_by_place(group))

    def _still_right(self, group: PlacedGroup, request: ModelRequest) -> bool:
        return (
            self._pools.allows(group.pool, request)
            and request.tensor_parallel in (None, group.tensor_parallel)
            and request.pipeline_parallel in (None, group.pipeline_parallel)
            and self._stages_are_whole(group)
        )

    def _stages_are_whole(self, group: PlacedGroup) -> bool:
        """Ranks that came back on other nodes may have torn a tensor-parallel stage apart."""
        degree = group.tensor_parallel
        domains = [self.free.domain(group.pool, rank) for rank in group.ranks]
        return all(domain is not None and domain is domains[index // degree * degree] for index, domain in enumerate(domains))


def _by_place(group: PlacedGroup) -> tuple:
    return group.model, group.pool, group.ranks
