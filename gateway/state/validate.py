"""What must be true of a site's objects together (rule 14). Pure; each problem names the field and the fix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.api.config import Manifest, ModelSpec, RouteSpec, TenantSpec
from gateway.state.snapshot import ObjectKey


@dataclass(frozen=True)
class Problem:
    """`field` is `Kind/name: path.in.the.document`."""

    field: str
    message: str


Site = Mapping[ObjectKey, Manifest]


def problems_of_writes(site: Site, written: Iterable[ObjectKey]) -> list[Problem]:
    """Problems that the written objects have in `site`, which is the state after the change.

    Objects that the change does not touch are not judged again: a forced deletion may have left them dangling.
    """
    written = sorted(written)
    owners = _name_owners(site)
    found: list[Problem] = []
    for key in written:
        spec = site[key].spec
        found += _name_problems(key, spec, owners)
        match spec:
            case ModelSpec():
                found += _missing(key, "spec.pools", spec.pools, "Pool", {name for kind, name in site if kind == "Pool"})
            case RouteSpec():
                targets = [target.model for target in spec.targets]
                models = {name for kind, name in site if kind == "Model"}
                found += _missing(key, "spec.targets", targets, "Model", models)
            case TenantSpec():
                found += _missing(key, "spec.routes", spec.routes, "Route", set(owners))
    return found


def problems_of_delete(site: Site, key: ObjectKey) -> list[Problem]:
    """Who in `site`, the state before the deletion, still names the object. `force` deletes it all the same."""
    names = {key.name}
    spec = site[key].spec
    if isinstance(spec, RouteSpec):
        names.update(spec.aliases)
    users = [str(other) for other, manifest in sorted(site.items()) if names & set(_references(key.kind, manifest.spec))]
    if not users:
        return []
    message = f"{key} is still named by {', '.join(users)}; change or delete that first, or delete with --force"
    return [Problem(str(key), message)]


def _references(kind: str, spec: object) -> tuple[str, ...]:
    """Names of objects of `kind` that a spec points to."""
    match kind, spec:
        case "Model", RouteSpec():
            return tuple(target.model for target in spec.targets)
        case "Model" | "Route", TenantSpec():
            return spec.routes
        case "Pool", ModelSpec():
            return spec.pools
    return ()


def _name_owners(site: Site) -> dict[str, list[str]]:
    """Models, routes and their aliases share one namespace: what a client may ask for. Name -> what claims it."""
    owners: dict[str, list[str]] = defaultdict(list)
    for key, manifest in sorted(site.items()):
        if key.kind in ("Model", "Route"):
            owners[key.name].append(str(key))
        if isinstance(manifest.spec, RouteSpec):
            for alias in manifest.spec.aliases:
                owners[alias].append(f"an alias of {key}")
    return owners


def _name_problems(key: ObjectKey, spec: object, owners: dict[str, list[str]]) -> list[Problem]:
    claims = [(key.name, str(key), "metadata.name")] if key.kind in ("Model", "Route") else []
    if isinstance(spec, RouteSpec):
        claims += [(alias, f"an alias of {key}", "spec.aliases") for alias in dict.fromkeys(spec.aliases)]
    found = []
    for name, claim, path in claims:
        others = list(owners[name])
        others.remove(claim)
        if others:
            message = f"the name {name!r} is taken by {others[0]}; models, routes and aliases share one namespace, choose another"
            found.append(Problem(f"{key}: {path}", message))
    return found


def _missing(key: ObjectKey, path: str, names: Iterable[str], kind: str, known: set[str]) -> list[Problem]:
    found = []
    for name in names:
        if name not in known:
            fix = (
                f"apply {kind}/{name} before or together with it, or name one of: {', '.join(sorted(known)) or 'none exist yet'}"
            )
            found.append(Problem(f"{key}: {path}", f"{kind} {name!r} does not exist; {fix}"))
    return found
