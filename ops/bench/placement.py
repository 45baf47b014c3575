"""Placement in figures: devices used against an exact solver's optimum, and how long plans take.

    python ops/bench/placement.py quality [--instances N] [--first SEED] [--limit SECONDS]     needs `pip install ortools`
    python ops/bench/placement.py defragment [the same]
    python ops/bench/placement.py scale

Everything is seeded. Prints a table against the targets; exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.placement_instances import fragmented_site, large_site, plain_model, random_site
from placement.consolidation import consolidate, devices_needed, devices_used
from placement.defragment import largest_island, make_room
from placement.footprint import group_footprint
from placement.packing import Packer, place
from placement.scoring import BALANCE, CONSOLIDATE

MEAN_RATIO, WORST_RATIO = 1.02, 1.10
PLAN_S = {(1_000, 500): 1.0, (10_000, 5_000): 20.0}
ADD_S = 0.1


def quality(instances: int, first: int, limit_s: float) -> bool:
    from ops.bench.placement_exact import fewest_devices

    ratios: list[float] = []
    bounded: list[float] = []
    infeasible = 0
    slowest_s = 0.0
    for seed in range(first, first + instances):
        site = random_site(seed)
        started = time.process_time()
        plan = consolidate(site)
        slowest_s = max(slowest_s, time.process_time() - started)
        if not plan.groups or plan.refusals:
            infeasible += 1  # more models than fit: nothing to compare
            continue
        used = devices_used(plan.groups)
        needed = devices_needed(site.devices, plan.groups)
        if used == needed:
            ratios.append(1.0)
            continue
        exact = fewest_devices(site.devices, plan.groups, limit_s)
        least = max(exact.value, needed)
        (ratios if exact.solved else bounded).append(used / least)
        if used > least:
            print(f"  seed {seed}: {used} devices, {'optimum' if exact.solved else 'bound'} {least}", flush=True)
    mean, worst = sum(ratios) / max(len(ratios), 1), max(ratios, default=0.0)
    print(f"instances {instances}: {len(ratios)} solved, {len(bounded)} bounded in {limit_s} s, {infeasible} with refusals")
    print(f"devices used / optimum   mean {mean:.4f} (target ≤ {MEAN_RATIO})   worst {worst:.3f} (target ≤ {WORST_RATIO})")
    if bounded:
        print(f"devices used / bound     mean {sum(bounded) / len(bounded):.4f}   worst {max(bounded):.3f}")
    print(f"slowest plan {slowest_s:.2f} s of CPU")
    return mean <= MEAN_RATIO and worst <= WORST_RATIO


def scale() -> bool:
    good = True
    for (gpus, models), target_s in PLAN_S.items():
        site = large_site(gpus, models)
        for policy in (BALANCE, CONSOLIDATE):
            started = time.process_time()
            plan = place(site, policy)
            plan_s = time.process_time() - started
            grown = replace(site, models=(*site.models, plain_model("new", 30)), placed=plan.groups)
            started = time.process_time()
            added = place(grown, policy)
            again_s = time.process_time() - started
            packer = Packer(grown, policy)
            packer.plan()
            started = time.process_time()
            packer.place_one(plain_model("newer", 30))
            add_s = time.process_time() - started
            name = type(policy).__name__.lower()
            print(
                f"{gpus:6} GPUs x {models:5} models, {name:11}: plan {plan_s:6.2f} s (target < {target_s:.0f}), "
                f"placed {len(plan.groups)}; with one model more: from scratch {again_s * 1e3:.0f} ms, "
                f"in a plan at hand {add_s * 1e3:.2f} ms (target < {ADD_S * 1e3:.0f})",
                flush=True,
            )
            good &= plan_s < target_s and add_s < ADD_S and len(added.loads) == 1 and not added.unloads
    return good


def defragment(instances: int, first: int, limit_s: float) -> bool:
    from ops.bench.placement_exact import fewest_moves

    ratio_moves = ratio_fewest = missed = unsolved = 0
    good = True
    for seed in range(first, first + instances):
        site, wide, degree = fragmented_site(seed)
        need = group_footprint(wide, degree, 1, "cuda")[0].total
        before = largest_island(site, need)
        started = time.process_time()
        room = make_room(site, wide, degree)
        plan_s = time.process_time() - started
        exact = fewest_moves(site, wide, degree, limit_s)
        after = before
        if room is not None:
            gone = Counter(move.before for move in room.moves)
            groups = (*(Counter(site.placed) - gone).elements(), *(move.after for move in room.moves))
            after = largest_island(replace(site, placed=groups), need)
            good &= after >= max(before, degree)
            if exact is not None and exact.solved:
                ratio_moves += len(room.moves)
                ratio_fewest += exact.value
        missed += room is None and exact is not None and exact.solved
        unsolved += exact is not None and not exact.solved
        moves = "no room" if room is None else f"{len(room.moves)} moves, {sum(m.bytes for m in room.moves) / 2**30:.0f} GiB"
        fewest = "none" if exact is None else f"{exact.value}{'' if exact.solved else '+'}"
        print(f"  seed {seed}: {degree} wide, island {before} -> {after}, {moves} (solver {fewest}), {plan_s:.2f} s", flush=True)
    print(f"moves {ratio_moves}, fewest {ratio_fewest} (target within 10 %); room missed {missed}, unsolved {unsolved}")
    return good and ratio_moves <= 1.10 * ratio_fewest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, instances in (("quality", 1000), ("defragment", 100)):
        one = commands.add_parser(name)
        one.add_argument("--instances", type=int, default=instances)
        one.add_argument("--first", type=int, default=0)
        one.add_argument("--limit", type=float, default=10.0)
    commands.add_parser("scale")
    arguments = parser.parse_args()
    if arguments.command == "scale":
        good = scale()
    else:
        compare = quality if arguments.command == "quality" else defragment
        good = compare(arguments.instances, arguments.first, arguments.limit)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
