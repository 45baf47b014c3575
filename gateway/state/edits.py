"""What a request to change the site comes to, as writes against one snapshot. Pure: the store runs it again if it lost a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from gateway.api.config import DESIRED_KINDS, Manifest, RouteSpec, Strict
from gateway.api.errors import ErrorCode, YardError, invalid, not_found
from gateway.api.manifest import read_text
from gateway.api.records import DesiredObject
from gateway.state.snapshot import ObjectKey, Snapshot
from gateway.state.validate import Problem, problems_of_delete, problems_of_writes

Action = Literal["created", "changed", "unchanged", "deleted", "switched", "rolled_back"]


@dataclass(frozen=True)
class Put:
    """One document to store. `generation`: only if the stored object has this one; 0 = whatever it has."""

    document: dict[str, Any]
    generation: int = 0


@dataclass(frozen=True)
class Write:
    """One object before and after. `generation` is the one it has afterwards, also when it is then deleted."""

    key: ObjectKey
    action: Action
    generation: int
    before: DesiredObject | None
    document: dict[str, Any] | None  # None: deleted
    previous: dict[str, Any] | None = None


def apply_edit(snapshot: Snapshot, puts: Sequence[Put]) -> list[Write]:
    """All of `puts`, or a YardError naming everything that is wrong with them."""
    manifests: dict[ObjectKey, Manifest] = {}
    writes: list[Write] = []
    for put in puts:
        manifest = parse_document(put.document)
        key = ObjectKey(manifest.kind, manifest.name)
        if key in manifests:
            raise invalid(f"{key} is given twice in one change; keep one of the two documents", f"{key}: metadata.name")
        manifests[key] = manifest
        writes.append(_put(snapshot, key, manifest, put))
    after = parsed_site(snapshot) | manifests
    _raise_first(ErrorCode.INVALID, problems_of_writes(after, manifests))
    return writes


def delete_edit(snapshot: Snapshot, key: ObjectKey, *, force: bool = False) -> list[Write]:
    stored = _stored(snapshot, key)
    if not force:
        _raise_first(ErrorCode.CONFLICT, problems_of_delete(parsed_site(snapshot), key))
    return [Write(key, "deleted", stored.generation + 1, stored, None)]


def switch_edit(snapshot: Snapshot, route: str, to_model: str, generation: int = 0) -> list[Write]:
    """Points a route to one model; what it pointed to before is kept for `rollback_edit`."""
    key = ObjectKey("Route", route)
    stored = _stored(snapshot, key)
    check_generation(stored, generation)
    if ObjectKey("Model", to_model) not in snapshot.objects:
        raise not_found(f"{key}: model {to_model!r} does not exist; apply it first, or see `yard get models`")
    document = {**stored.manifest, "spec": {**stored.manifest["spec"], "targets": [{"model": to_model, "weight": 100}]}}
    if targets_of(parse_document(document)) == targets_of(parse_document(stored.manifest)):
        return [Write(key, "unchanged", stored.generation, stored, stored.manifest, stored.previous)]
    return [Write(key, "switched", stored.generation + 1, stored, document, stored.manifest)]


def rollback_edit(snapshot: Snapshot, route: str) -> list[Write]:
    """Points a route to the targets it had before its last switch. Doing it twice never leads forward again."""
    key = ObjectKey("Route", route)
    stored = _stored(snapshot, key)
    if stored.previous is None:
        message = (
            f"{key} has nothing to roll back to: it was never switched, or has been rolled back already; "
            "point it somewhere with `yard route switch`"
        )
        raise YardError(ErrorCode.CONFLICT, message, field=str(key))
    document = {**stored.manifest, "spec": {**stored.manifest["spec"], "targets": stored.previous["spec"]["targets"]}}
    missing = sorted(model for model in targets_of(parse_document(document)) if ObjectKey("Model", model) not in snapshot.objects)
    if missing:
        message = f"{key} cannot be rolled back: model {missing[0]!r} of its earlier targets is gone; apply that model again"
        raise YardError(ErrorCode.CONFLICT, message, field=str(key))
    return [Write(key, "rolled_back", stored.generation + 1, stored, document)]


def targets_of(manifest: Manifest) -> dict[str, int]:
    """Model -> weight of a Route document; empty for other kinds."""
    spec = manifest.spec
    return {target.model: target.weight for target in spec.targets} if isinstance(spec, RouteSpec) else {}


def check_generation(stored: DesiredObject | None, given: int, key: ObjectKey | None = None) -> None:
    """CONFLICT unless `given` is 0 or the stored generation."""
    have = stored.generation if stored else 0
    if given in (0, have):
        return
    name = ObjectKey(stored.kind, stored.name) if stored else key
    by = f" (written by {stored.actor})" if stored and stored.actor else ""
    message = f"{name}: generation {given} was given, the store has {have or 'none'}{by}; read it again and repeat the change"
    raise YardError(ErrorCode.CONFLICT, message, field=f"{name}: generation")


def parse_document(document: dict[str, Any]) -> Manifest:
    """The document as its kind's class; INVALID names the field."""
    if document.get("kind") == "Site":
        message = "a Site is read from the site directory by `yard up` and not kept in the store; leave it out of the change"
        raise invalid(message, "kind")
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        metadata = document.get("metadata")
        name = metadata.get("name", "?") if isinstance(metadata, Mapping) else "?"
        raise invalid(_explained(document, f"{document.get('kind', '?')}/{name}", error), _field(document, error)) from error
    if not isinstance(manifest.spec, Strict):
        raise invalid(f"{manifest.kind}/{manifest.name}: spec must be a mapping", "spec")
    return manifest


def _explained(document: dict[str, Any], name: str, error: ValidationError) -> str:
    """Says it as the reader of YAML files does, with the nearest known key; lines are those of the object as YAML."""
    try:
        read_text(yaml.safe_dump(document, sort_keys=False), name)
    except YardError as explained:
        return explained.message
    return f"{name}: {error}"


def _field(document: dict[str, Any], error: ValidationError) -> str:
    """`spec.limits.queue`: where the first error is. The specification is validated inside, so its path lacks `spec`."""
    path = error.errors(include_url=False)[0]["loc"]
    if path and path[0] not in Manifest.model_fields and isinstance(document.get("spec"), Mapping):
        path = ("spec", *path)
    return ".".join(map(str, path)) or "document"


def parsed_site(snapshot: Snapshot) -> dict[ObjectKey, Manifest]:
    """Every stored object that this version can read."""
    site = {}
    for key, stored in snapshot.objects.items():
        try:
            site[key] = Manifest.model_validate(stored.manifest)
        except ValidationError:
            continue  # The view reports it; it must not stand in the way of repairing it.
    return site


def _put(snapshot: Snapshot, key: ObjectKey, manifest: Manifest, put: Put) -> Write:
    stored = snapshot.objects.get(key)
    check_generation(stored, put.generation, key)
    if stored is None:
        return Write(key, "created", snapshot.generation(key) + 1, None, put.document)
    try:
        before = Manifest.model_validate(stored.manifest)
    except ValidationError:
        return Write(key, "changed", stored.generation + 1, stored, put.document)
    if before == manifest:
        return Write(key, "unchanged", stored.generation, stored, stored.manifest, stored.previous)
    switched = targets_of(before) != targets_of(manifest)
    previous = stored.manifest if switched else stored.previous
    return Write(key, "changed", stored.generation + 1, stored, put.document, previous)


def _stored(snapshot: Snapshot, key: ObjectKey) -> DesiredObject:
    stored = snapshot.objects.get(key)
    if stored is None:
        if key.kind not in DESIRED_KINDS:
            raise invalid(f"kind {key.kind!r} is not one of {', '.join(DESIRED_KINDS)}", "kind")
        known = sorted(name for kind, name in snapshot.objects if kind == key.kind)
        raise not_found(f"{key} does not exist; there are: {', '.join(known) or 'none'}")
    return stored


def as_error(code: ErrorCode, problems: Sequence[Problem]) -> YardError:
    """One error that names them all."""
    lines = [
        problem.message if problem.field in problem.message else f"{problem.field}: {problem.message}" for problem in problems
    ]
    return YardError(code, "\n".join(lines), field=problems[0].field)


def _raise_first(code: ErrorCode, problems: Sequence[Problem]) -> None:
    if problems:
        raise as_error(code, problems)
