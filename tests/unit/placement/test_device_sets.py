"""Packing anew on fewer devices, where closing one after the other ends: wide groups change places as one."""

from __future__ import annotations

import pytest
from sites import GIB, model, node

from placement import device_sets
from placement.consolidation import devices_used
from placement.device_sets import on_fewer
from placement.filling import Steps, fill
from placement.types import PlacedGroup, Snapshot


def _group(name: str, ranks: tuple[int, ...], gib: float) -> PlacedGroup:
    return PlacedGroup(name, "p", ranks, len(ranks), 1, (int(gib * GIB),) * len(ranks))


def test_a_wide_group_goes_where_the_rest_fits_beside_it() -> None:
    """All five devices are in use: the pair's node must be chosen for what goes beside it, not for the pair."""
    devices = node("p", "a", 2, 24) + node("p", "b", 2, 40, first_rank=2) + node("p", "c", 1, 40, first_rank=4)
    groups = (
        _group("pair", (0, 1), 20),
        _group("x", (2,), 20),
        _group("y", (3,), 20),
        _group("z", (4,), 40),
    )
    snapshot = Snapshot(devices, tuple(model(group.model, 1) for group in groups))
    found = on_fewer(snapshot, groups, 3, Steps(10_000))
    assert found is not None
    assert devices_used(found) == 3
    assert next(group.ranks for group in found if group.model == "pair") == (2, 3)


def test_what_is_left_of_the_effort_goes_to_a_longer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = node("p", "n", 3, 13)
    groups = tuple(_group(f"m{index}", (index % 3,), size) for index, size in enumerate((7, 6, 5, 4, 4)))
    snapshot = Snapshot(devices, tuple(model(group.model, 1) for group in groups))
    found = []
    for shares in ((1,), (1, 10_000)):
        monkeypatch.setattr(device_sets, "_SET_STEPS", shares)
        found.append(on_fewer(snapshot, groups, 2, Steps(20_000)) is not None)
    assert found == [False, True]


def test_devices_are_filled_with_what_fits_them_best() -> None:
    """Both have to be full: 12 = 4 + 4 + 4 and 13 = 7 + 6."""
    devices = node("p", "n", 1, 12) + node("p", "n", 1, 13, first_rank=1)
    sizes = (7, 6, 4, 4, 4)
    groups = [_group(f"m{index}", (0,), size) for index, size in enumerate(sizes)]
    models = {group.model: model(group.model, 1) for group in groups}
    found = fill(devices, models, dict.fromkeys(models, "cuda"), groups, Steps(1_000))
    assert found is not None
    assert sorted(group.model for group in found if group.ranks == (0,)) == ["m2", "m3", "m4"]


def test_two_groups_of_a_model_never_share_a_device() -> None:
    devices = node("p", "n", 2, 24)
    groups = (_group("m", (0,), 10), _group("m", (1,), 10))
    snapshot = Snapshot(devices, (model("m", 9, replicas=2),))
    assert on_fewer(snapshot, groups, 1, Steps(10_000)) is None


def test_models_stay_in_their_pools() -> None:
    devices = node("p", "n", 1, 24) + node("q", "o", 1, 40)
    groups = (_group("m", (0,), 10), PlacedGroup("o", "q", (0,), 1, 1, (10 * GIB,)))
    snapshot = Snapshot(devices, (model("m", 9, pools=("p",)), model("o", 9)))
    found = on_fewer(snapshot, groups, 1, Steps(10_000))
    assert found is not None
    assert {group.pool for group in found} == {"p"}


def test_the_effort_is_bounded() -> None:
    devices = node("p", "n", 8, 24)
    groups = tuple(_group(f"m{index}", (index % 8,), 5.3 + index / 7) for index in range(27))
    snapshot = Snapshot(devices, tuple(model(group.model, 1) for group in groups))
    steps = Steps(500)
    on_fewer(snapshot, groups, 7, steps)
    assert steps.left > -2_000
