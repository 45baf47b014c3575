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
    is_dangling: bool = False  # it names something that does not exist


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
                found += _route_problems(key, spec, site)
            case TenantSpec():
                found += _missing(key, "spec.routes", spec.routes, "Route", set(owners))
                found += _key_problems(key, spec, site)
    return found


def problems_of_delete(site: Site, key: ObjectKey) -> list[Problem]:
    """Who in `site`, the state before the deletion, still names the object. `force` deletes it all the same."""
    names = {key.name}
    spec = site[key].spec
    if isinstance(spec, RouteSpec):
        names.update(spec.aliases)
    users = [str(other) for other, manifest in sorted(site.items()) if names & set(_references(key.kind, manifest.spec))]
    if key.kind == "Pool" and not users:
        return _stranded(site, key)
    if not users:
        return []
    message = f"{key} is still named by {', '.join(users)}; change or delete that first, or delete with --force"
    return [Problem(str(key), message)]


def _stranded(site: Site, pool: ObjectKey) -> list[Problem]:
    """Models that the last pool takes with it: every route to them would stop answering."""
    if any(other.kind == "Pool" and other != pool for other in site):
        return []
    models = [
        str(key)
        for key, manifest in sorted(site.items())
        if isinstance(manifest.spec, ModelSpec) and manifest.spec.replicas and manifest.spec.is_managed
    ]
    if not models:
        return []
    message = f"{pool} is the last pool, and {', '.join(models)} would have no place; delete those first, or delete with --force"
    return [Problem(str(pool), message)]


def _references(kind: str, spec: object) -> tuple[str, ...]:
    """Names of objects of `kind` that a spec points to."""
    match kind, spec:
        case "Model", RouteSpec():
            return spec.models
        case "Tenant", RouteSpec():
            return spec.canary.tenants if spec.canary else ()
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


def _route_problems(key: ObjectKey, spec: RouteSpec, site: Site) -> list[Problem]:
    models = {name for kind, name in site if kind == "Model"}
    found = _missing(key, "spec.targets", [target.model for target in spec.targets], "Model", models)
    found += _missing(key, "spec.rules", [rule.model for rule in spec.rules], "Model", models)
    found += _missing(key, "spec.fallback", spec.fallback, "Model", models)
    if spec.canary is not None:
        found += _missing(key, "spec.canary.model", [spec.canary.model], "Model", models)
        found += _missing(key, "spec.canary.tenants", spec.canary.tenants, "Tenant", {n for kind, n in site if kind == "Tenant"})
    if spec.shadow is not None:
        found += _missing(key, "spec.shadow.model", [spec.shadow.model], "Model", models)
    return found


def _key_problems(key: ObjectKey, spec: TenantSpec, site: Site) -> list[Problem]:
    """A key must say who asks."""
    others = [
        str(other)
        for other, manifest in sorted(site.items())
        if other != key and isinstance(manifest.spec, TenantSpec) and set(spec.key_hashes) & set(manifest.spec.key_hashes)
    ]
    if not others:
        return []
    return [Problem(f"{key}: spec.key_hashes", f"{others[0]} has one of these keys too; give each tenant keys of its own")]


def _missing(key: ObjectKey, path: str, names: Iterable[str], kind: str, known: set[str]) -> list[Problem]:
    found = []
    for name in names:
        if name not in known:
            fix = (
                f"apply {kind}/{name} before or together with it, or name one of: {', '.join(sorted(known)) or 'none exist yet'}"
            )
            found.append(Problem(f"{key}: {path}", f"{kind} {name!r} does not exist; {fix}", is_dangling=True))
    return found
