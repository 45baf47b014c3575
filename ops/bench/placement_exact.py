"""The fewest devices that hold a set of groups, by OR-tools' CP-SAT (`pip install ortools`; used by the benchmark only)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from placement.types import Device, PlacedGroup

MIB = 2**20


@dataclass(frozen=True)
class Exact:
    solved: bool  # proved optimal
    devices: int  # the optimum; unsolved: the best bound, which no plan can be below


def fewest_devices(devices: tuple[Device, ...], groups: tuple[PlacedGroup, ...], limit_s: float, workers: int = 1) -> Exact:
    """`groups` of one stage each; where they are now is the hint the search starts from."""
    model = cp_model.CpModel()
    capacity = [device.capacity_bytes // MIB for device in devices]
    used = [model.new_bool_var(f"used{index}") for index in range(len(devices))]
    domains: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        domains[device.node].append(index)
    load: dict[int, list[tuple[cp_model.IntVar, int]]] = defaultdict(list)
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
                model.add_implication(shard, used[index])
                model.add_hint(shard, devices[index].rank in group.ranks)
        model.add_exactly_one(homes)
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
