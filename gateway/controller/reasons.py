"""Why models are nowhere and pools do not serve, and what of it is worth an event. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gateway.controller.model_requests import READING
from gateway.controller.situation import START_DEADLINE_S, Desired, Emit, Observed
from placement.types import PlacedGroup, Plan


def pool_troubles(desired: Desired, observed: Observed) -> dict[str, str]:
    """Desired pools that do not serve, and why."""
    troubles: dict[str, str] = {}
    for name, entry in desired.pools.items():
        sight, app = observed.pools.get(name), observed.apps.get(name)
        if sight is not None and sight.missing_s == 0:
            if sight.record.message:
                troubles[name] = f"pool `{name}`: {sight.record.message}"
        elif app is None:
            troubles[name] = f"pool `{name}` is about to be deployed"
        elif app.status == "DEPLOYING" and app.age_s < START_DEADLINE_S:
            troubles[name] = f"pool `{name}` is starting"
        elif sight is not None:
            troubles[name] = f"pool `{name}`: no heartbeat for {sight.missing_s:.0f} s; its driver is being started again"
        else:
            needs = f"{entry.spec.devices} × {entry.spec.device}"
            why = app.message or f"no heartbeat since its application was deployed; see `ray status` for room for {needs}"
            troubles[name] = f"pool `{name}` did not come up in {app.age_s:.0f} s ({app.status}): {why}"
    return troubles


def is_starting(pool: str, observed: Observed) -> bool:
    app = observed.apps.get(pool)
    sight = observed.pools.get(pool)
    gone = sight is None or sight.missing_s > 0
    return gone and (app is None or (app.status == "DEPLOYING" and app.age_s < START_DEADLINE_S))


def unplaced_models(plan: Plan, desired: Desired, troubles: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Model -> reasons: its own first, then of the pools it could use that are not up."""
    reasons: dict[str, tuple[str, ...]] = {}
    for name, asked in sorted(desired.models.items()):
        refused = plan.refusals.get(name, ())
        found = [asked.problem] if asked.request is None else [reason.message for reason in refused]
        if not found:
            continue
        pools = [text for pool, text in sorted(troubles.items()) if not asked.spec.pools or pool in asked.spec.pools]
        if pools and refused and refused[0].code == "no_device" and not refused[0].pool:
            found = []  # there are pools, and what is with them is the reason
        reasons[name] = tuple(dict.fromkeys(found + pools))
    return reasons


def final_refusals(unplaced: Iterable[str], desired: Desired, observed: Observed) -> frozenset[str]:
    """The unplaced models for which nothing is on its way: no checkpoint being read, no pool that is starting."""
    starting = [name for name in desired.pools if is_starting(name, observed)]
    final = set()
    for name in unplaced:
        pools = desired.models[name].spec.pools
        waits = desired.models[name].problem == READING or any(not pools or pool in pools for pool in starting)
        if not waits:
            final.add(name)
    return frozenset(final)


def events_of(
    groups: tuple[PlacedGroup, ...],
    refused: Mapping[str, tuple[str, ...]],
    known: tuple[PlacedGroup, ...],
    desired: Desired,
) -> tuple[Emit, ...]:
    before, after = _places(known), _places(groups)
    events = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name in after:
            events.append(Emit("model.placed", f"Model/{name}", "; ".join(after[name])))
        elif name not in desired.models:
            events.append(Emit("model.removed", f"Model/{name}", f"was {'; '.join(before[name])}"))
    for name, reasons in sorted(refused.items()):
        events.append(Emit("model.unplaced", f"Model/{name}", reasons[0]))
    return tuple(events)


def _places(groups: Iterable[PlacedGroup]) -> dict[str, tuple[str, ...]]:
    places: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        ranks = ", ".join(map(str, group.ranks))
        split = f"tensor {group.tensor_parallel} × pipeline {group.pipeline_parallel}"
        places[group.model].append(f"pool `{group.pool}`, ranks {ranks} ({split})")
    return {model: tuple(texts) for model, texts in places.items()}
