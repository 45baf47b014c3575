"""From the name that a client asks for to the model that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.errors import not_found
from gateway.state.view import ModelEntry, RouteEntry, SiteView

SUGGESTED_NAMES = 8


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's model. `route_generation` is that of the route (of the model, when it was asked by its own name)."""

    route: str
    route_generation: int
    model: str
    entry: ModelEntry


def resolve(view: SiteView, name: str, *, ready: Callable[[str], bool], pick: float) -> Resolved:
    """Chooses among the route's targets by weight, with `pick` drawn uniformly from [0, 1).

    1. A name is a route, an alias of one, or a model's own name (then it is a route of one target).
    2. Targets with weight 0, and those whose model no longer exists, take no traffic.
    3. Among the rest, those that are ready share all traffic by weight; when none is, all share it, and the request is
       held or refused by whoever must bring the model in.

    YardError(NOT_FOUND) names what could have been asked.
    """
    route = view.resolve(name)
    if route is None:
        raise not_found(_unknown(view, name))
    targets = [(model, weight) for model, weight in route.targets if weight > 0 and model in view.models]
    if not targets:
        models = ", ".join(f"`{model}`" for model, _ in route.targets)
        raise not_found(f"route `{name}` points at {models}, which does not exist; apply the model or `yard route switch {name}`")
    serving = [target for target in targets if ready(target[0])] or targets
    model = _weighted(serving, pick)
    return Resolved(route.name, route.generation, model, view.models[model])


def _weighted(targets: list[tuple[str, int]], pick: float) -> str:
    if len(targets) == 1:
        return targets[0][0]
    point = pick * sum(weight for _, weight in targets)
    for model, weight in targets:
        point -= weight
        if point < 0:
            return model
    return targets[-1][0]


def names(view: SiteView) -> list[RouteEntry]:
    """All that can be asked for, routes first; a model that a route's name or alias hides is not listed by its own name."""
    routes = sorted(view.routes.values(), key=lambda route: route.name)
    hidden = view.routes.keys() | view.aliases.keys()
    models = sorted(name for name in view.models if name not in hidden)
    return routes + [RouteEntry(name, view.models[name].generation, ((name, 1),), implicit=True) for name in models]


def _unknown(view: SiteView, name: str) -> str:
    known = [route.name for route in names(view)]
    if not known:
        return f"no model or route `{name}`: the site has none yet; apply a Model manifest"
    more = ", …" if len(known) > SUGGESTED_NAMES else ""
    return f"no model or route `{name}`; there are {', '.join(known[:SUGGESTED_NAMES])}{more}"
