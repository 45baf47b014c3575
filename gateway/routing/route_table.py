"""From the name that a client asks for to the model that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.config import RouteRuleSpec, RouteSpec
from gateway.api.errors import YardError, not_found, shortened, unavailable
from gateway.routing.ask import Ask
from gateway.state.view import ModelEntry, RouteEntry, SiteView

SUGGESTED_NAMES = 8
UNREAD_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's model. `route_generation` is that of the route (of the model, when it was asked by its own name).

    `shadow`: the model that gets a copy of the request, if any. `why`: what chose the model (target, canary, rule, fallback).
    """

    route: str
    route_generation: int
    model: str
    entry: ModelEntry
    shadow: str | None = None
    why: str = "target"


def resolve(view: SiteView, name: str, *, ready: Callable[[str], bool], ask: Ask) -> Resolved:
    """Chooses a model for a request.

    1. A name is a route, an alias of one, or a model's own name (then it is a route of one target).
    2. Models that do not exist any more and targets with weight 0 take no traffic.
    3. A canary takes the callers that it names, by tenant or header.
    4. Else the first rule that holds of the prompt's length and the quality asked for decides. Rules about length hold of no
       prompt whose tokens were not counted yet (see `needs_length`).
    5. Else the canary takes its percentage of the callers. What is sticky has its place by a hash, so it stays on one side,
       also when the percentage grows.
    6. Else the targets share by weight.
    7. What was chosen and is not ready gives way to a ready target, else to the first ready model of `fallback`; when
       nothing is ready it stays, and the request is held or refused by whoever must bring the model in.

    YardError(NOT_FOUND) names what could have been asked; see `unknown`.
    """
    route = view.resolve(name)
    if route is None:
        raise unknown(view, name)
    targets = [(model, weight) for model, weight in route.targets if weight > 0 and model in view.models]
    if not targets:
        models = ", ".join(f"`{model}`" for model, _ in route.targets)
        raise not_found(f"route `{name}` points at {models}, which does not exist; apply the model or `yard route switch {name}`")
    spec = route.spec
    share = ask.share(route.name, spec.sticky if spec else None)
    model, why = _chosen(view, spec, targets, ask, share)
    if not ready(model):
        model, why = _instead(view, spec, targets, share, ready) or (model, why)
    shadow = _shadow(view, spec, model, ask)
    return Resolved(route.name, route.generation, model, view.models[model], shadow, why)


def needs_length(view: SiteView, name: str) -> bool:
    """Whether the number of prompt tokens may decide where a request for `name` goes."""
    route = view.resolve(name)
    return route is not None and route.spec is not None and any(map(_about_length, route.spec.rules))


def _chosen(
    view: SiteView,
    spec: RouteSpec | None,
    targets: list[tuple[str, int]],
    ask: Ask,
    share: float,
) -> tuple[str, str]:
    if spec is not None:
        canary = spec.canary if spec.canary is not None and spec.canary.model in view.models else None
        if canary is not None:
            named = ask.tenant in canary.tenants or any(ask.headers.get(key) == value for key, value in canary.headers.items())
            if named:
                return canary.model, "canary"
        for rule in spec.rules:
            if rule.model in view.models and _holds(rule, ask):
                return rule.model, "rule"
        if canary is not None and canary.percent:
            part = canary.percent / 100
            if share < part:
                return canary.model, "canary"
            share = (share - part) / (1 - part)  # the rest is spread over the weights evenly
    return _weighted(targets, share), "target"


def _instead(
    view: SiteView, spec: RouteSpec | None, targets: list[tuple[str, int]], share: float, ready: Callable[[str], bool]
) -> tuple[str, str] | None:
    serving = [target for target in targets if ready(target[0])]
    if serving:
        # Those of one target must not all go to the same other: the finer digits of their place spread them.
        return _weighted(serving, share * 2**16 % 1.0), "target"
    for model in spec.fallback if spec is not None else ():
        if model in view.models and ready(model):
            return model, "fallback"
    return None


def _shadow(view: SiteView, spec: RouteSpec | None, model: str, ask: Ask) -> str | None:
    shadow = spec.shadow if spec is not None else None
    if shadow is None or shadow.model == model or shadow.model not in view.models:
        return None
    return shadow.model if ask.shadow_pick * 100 < shadow.percent else None


def _about_length(rule: RouteRuleSpec) -> bool:
    return rule.min_prompt_tokens is not None or rule.max_prompt_tokens is not None


def _holds(rule: RouteRuleSpec, ask: Ask) -> bool:
    if rule.quality is not None and rule.quality != ask.quality:
        return False
    if not _about_length(rule):
        return True
    tokens = ask.prompt_tokens
    if tokens is None:
        return False
    return (rule.min_prompt_tokens or 0) <= tokens <= (rule.max_prompt_tokens or tokens)


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


def listed(view: SiteView, may_ask: Callable[[str, str], bool]) -> list[tuple[str, RouteEntry]]:
    """Every name with what it leads to, aliases after their routes. `may_ask` takes a name and its route's own."""
    found = [(name, route) for route in names(view) for name in (route.name, *sorted(route.aliases))]
    return [(name, route) for name, route in found if may_ask(name, route.name)]


def unknown(view: SiteView, name: str) -> YardError:
    """What to answer about a name that leads nowhere: NOT_FOUND, UNAVAILABLE before the site was read, when nobody knows yet."""
    if not view.synced:
        return unavailable("this gateway has just started and has not read the site yet", UNREAD_RETRY_S)
    name = shortened(name)
    known = [known for known, _ in listed(view, lambda *_: True)]
    if not known:
        return not_found(f"no model or route `{name}`: the site has none yet; apply a Model manifest")
    more = ", …" if len(known) > SUGGESTED_NAMES else ""
    return not_found(f"no model or route `{name}`; there are {', '.join(known[:SUGGESTED_NAMES])}{more}")
