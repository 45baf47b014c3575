"""Brings the site directory's objects into the site without undoing what ops did since.

An object is written when its file is new or changed since `yard up` last applied it. One that was changed on the running site (a
route switched, a model resized) or deleted there while its file stayed the same is kept as it is. A store that never held
anything gets all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.errors import ErrorCode, YardError
from gateway.api.manifest import Located
from gateway.api.proto import admin_pb2 as admin
from gateway.site.client import SiteClient
from gateway.site.home import Home, write_private


@dataclass(frozen=True, slots=True)
class Reconciled:
    written: tuple[str, ...]  # "Kind name"
    kept: tuple[str, ...]  # differ from their unchanged files
    deleted: tuple[str, ...]  # gone from the site, while their files are unchanged
    notes: tuple[str, ...] = ()  # what follows from what was written, e.g. that a pool starts anew


def to_object(document: Located, generation: int = 0) -> admin.Object:
    kind, name = document.key
    return admin.Object(kind=kind, name=name, generation=generation, manifest_json=json.dumps(document.plain))


def reconcile(client: SiteClient, home: Home, documents: Sequence[Located]) -> Reconciled:
    answer = client.get()
    stored = {(item.kind, item.name): json.loads(item.manifest_json) for item in answer.objects}
    applied = _read_applied(home) if answer.revision else {}
    to_write, kept, deleted = [], [], []
    for document in documents:
        current = stored.get(document.key)
        if applied.get(_name(document)) != _digest(document.plain):
            if current is None or not same(current, document):
                to_write.append(document)
        elif current is None:
            deleted.append(_name(document))
        elif not same(current, document):
            kept.append(_name(document))
    notes: list[str] = []
    if to_write:
        changes = client.apply([to_object(document) for document in to_write]).changes
        notes = [f"{change.kind} {change.name}: {note}" for change in changes for note in change.notes]
    content = {**applied, **{_name(document): _digest(document.plain) for document in documents}}
    write_private(home.applied_file, msgspec.json.encode(content))
    return Reconciled(tuple(_name(document) for document in to_write), tuple(kept), tuple(deleted), tuple(notes))


def same(stored: dict[str, Any], document: Located) -> bool:
    """Whether a stored manifest means what the document says, defaults and units aside."""
    spec = document.manifest.spec
    return type(spec).model_validate(stored.get("spec") or {}) == spec


def _name(document: Located) -> str:
    return " ".join(document.key)


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _read_applied(home: Home) -> dict[str, str]:
    try:
        return msgspec.json.decode(home.applied_file.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise YardError(
            ErrorCode.INTERNAL,
            f"{home.applied_file} cannot be read ({error}); remove it: `yard up` then writes all objects of the site directory, "
            "over what was changed on the running site",
        ) from error
