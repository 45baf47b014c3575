"""The fewest devices for a set of groups, and the fewest moves that make room, by OR-tools' CP-SAT (an optional dependency)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from placement.footprint import group_footprint
from placement.types import Device, ModelRequest, PlacedGroup, Snapshot

MIB = 2**20


@dataclass(frozen=True)
class Exact:
    solved: bool  # proved optimal
    value: int  # the optimum; unsolved: the best bound, which no plan can be below


class _Replicas(defaultdict[tuple[str, int], list[cp_model.IntVar]]):
    """Shards of all groups of a model that may be on a device, by (model, device)."""

    def __init__(self) -> None:
        super().__init__(list)

    def keep_apart(self, model: cp_model.CpModel) -> None:
        for shards in self.values():
            if len(shards) > 1:
                model.add_at_most_one(shards)


def fewest_devices(devices: tuple[Device, ...], groups: tuple[PlacedGroup, ...], limit_s: float, workers: int = 1) -> Exact:
    """`groups` of one stage each; where they are now is the hint the search starts from."""
    model = cp_model.CpModel()
    capacity = [device.capacity_bytes // MIB for device in devices]
    used = [model.new_bool_var(f"used{index}") for index in range(len(devices))]
    domains: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        domains[device.node].append(index)
    load: dict[int, list[tuple[cp_model.IntVar, int]]] = defaultdict(list)
    replicas = _Replicas()
    for group in groups:
        need = -(-group.bytes_per_rank[0] // MIB)
        homes = []
        for members in domains.values():
            fitting = [index for index in members if capacity[index] >= need]
            if len(fitting) < group.tensor_parallel:
                continue
            home = model.new_bool_var("")
            homes.append(home)
            shards = {index: model.new_bool_var("") for index in fitting}
            model.add(sum(shards.values()) == group.tensor_parallel * home)
            for index, shard in shards.items():
                load[index].append((shard, need))
                replicas[group.model, index].append(shard)
                model.add_implication(shard, used[index])
                model.add_hint(shard, devices[index].rank in group.ranks)
        model.add_exactly_one(homes)
    replicas.keep_apart(model)
    for index in range(len(devices)):
        model.add(sum(shard * need for shard, need in load[index]) <= capacity[index] * used[index])
    total = sum(-(-size // MIB) for group in groups for size in group.bytes_per_rank)
    model.add(sum(size * flag for size, flag in zip(capacity, used, strict=True)) >= total)
    _break_symmetry(model, domains, capacity, used)
    model.minimize(sum(used))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status == cp_model.OPTIMAL:
        return Exact(True, round(solver.objective_value))
    return Exact(False, max(1, -int(-solver.best_objective_bound // 1)))


def fewest_moves(snapshot: Snapshot, request: ModelRequest, degree: int, limit_s: float, workers: int = 1) -> Exact | None:
    """Groups that must move so that `degree` devices of one node have room for `request`; None when there is no way."""
    model = cp_model.CpModel()
    devices = snapshot.devices
    nodes: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        nodes[device.node].append(index)
    pinned = {each.name for each in snapshot.models if each.pinned}
    island = -(-group_footprint(request, degree, 1, "cuda")[0].total // MIB)
    load: dict[int, list[tuple[cp_model.IntVar, int]]] = defaultdict(list)
    replicas = _Replicas()
    moved = []
    for group in snapshot.placed:
        need = -(-group.bytes_per_rank[0] // MIB)
        stays = _shards(model, nodes, load, replicas, group.model, group.tensor_parallel, need, devices, group.ranks)
        if group.model in pinned:
            model.add(stays == 1)
        else:
            moved.append(1 - stays)
    _shards(model, nodes, load, replicas, request.name, degree, island, devices, ())
    replicas.keep_apart(model)
    for index, device in enumerate(devices):
        model.add(sum(shard * need for shard, need in load[index]) <= device.capacity_bytes // MIB)
    model.minimize(sum(moved))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status == cp_model.OPTIMAL:
        return Exact(True, round(solver.objective_value))
    return Exact(False, max(0, -int(-solver.best_objective_bound // 1)))


def _shards(
    model: cp_model.CpModel,
    nodes: dict[str, list[int]],
    load: dict[int, list[tuple[cp_model.IntVar, int]]],
    replicas: _Replicas,
    name: str,
    degree: int,
    need: int,
    devices: tuple[Device, ...],
    ranks: tuple[int, ...],
) -> cp_model.IntVar:
    """One group's shards, anywhere in one node. The result is 1 only if they are all on `ranks`."""
    homes = []
    stays = model.new_bool_var("")
    for members in nodes.values():
        home = model.new_bool_var("")
        homes.append(home)
        shards = {index: model.new_bool_var("") for index in members}
        model.add(sum(shards.values()) == degree * home)
        for index, shard in shards.items():
            load[index].append((shard, need))
            replicas[name, index].append(shard)
            here = devices[index].rank in ranks
            model.add_hint(shard, here)
            if here:
                model.add_implication(stays, shard)
    model.add_exactly_one(homes)
    model.add_hint(stays, True)
    return stays


def _break_symmetry(
    model: cp_model.CpModel, domains: dict[str, list[int]], capacity: list[int], used: list[cp_model.IntVar]
) -> None:
    """Like devices of a node are used from the first on, of like nodes the first ones most."""
    alike: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for members in domains.values():
        alike[tuple(capacity[index] for index in members)].append(members)
        for left, right in pairwise(members):
            if capacity[left] == capacity[right]:
                model.add(used[left] >= used[right])
    for nodes in alike.values():
        for left, right in pairwise(nodes):
            model.add(sum(used[index] for index in left) >= sum(used[index] for index in right))
