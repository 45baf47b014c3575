"""What a file of `yard backup` would bring into a site: judged as a whole, like an apply (rule 14). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gateway.api.config import DESIRED_KINDS
from gateway.api.errors import ErrorCode, YardError, invalid
from gateway.api.records import DesiredObject
from gateway.state.edits import as_error, parse_document, parsed_site
from gateway.state.snapshot import Backup, ObjectKey, Snapshot, lost_names, newest
from gateway.state.validate import problems_of_writes

HIGHEST = 2**52
"""Of a revision or a generation. Redis' scripts count in doubles, exact below 2**53; above this no room is left to count on."""


def read_backup(text: str) -> Snapshot:
    """YardError(INVALID) names everything that cannot be in a file of `yard backup`."""
    try:
        backup = msgspec.json.decode(text, type=Backup)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"this is no file of `yard backup`: {error}", "snapshot_json") from error
    problems = [*_number("revision", backup.revision, 0)]
    seen: set[ObjectKey] = set()
    for stored in backup.objects:
        key = ObjectKey(stored.kind, stored.name)
        if key in seen:
            problems.append(f"{key} is in it twice; keep one of the two")
        seen.add(key)
        problems += _object_problems(key, stored)
    for name, generation in backup.tombstones.items():
        if ObjectKey.parse(name).kind not in DESIRED_KINDS:
            problems.append(f"tombstones: {name!r} is not Kind/name with one of {', '.join(DESIRED_KINDS)}")
        problems += _number(f"tombstones: {name}", generation, 1)
    if problems:
        raise invalid("\n".join(f"the backup cannot be restored: {problem}" for problem in problems), "snapshot_json")
    return backup.snapshot()


def checked(held: Snapshot, stored: Snapshot, *, force: bool) -> Snapshot:
    """`held`, if what it would write is right together with what is stored. YardError(INVALID); `force` takes names that lead
    nowhere, as a forced deletion leaves them, but never two owners of one name."""
    after = parsed_site(newest(held, stored))
    written = [key for key in lost_names(held, stored) if key in after]
    problems = [problem for problem in problems_of_writes(after, written) if not (force and problem.is_dangling)]
    if problems:
        raise as_error(ErrorCode.INVALID, problems)
    return held


def deleted_since(held: Snapshot, stored: Snapshot) -> dict[ObjectKey, int]:
    """Objects of `held` that were deleted from the store afterwards -> the generation they ended with."""
    ended = {key: stored.tombstones[key] for key in held.objects if key not in stored.objects and key in stored.tombstones}
    return {key: generation for key, generation in sorted(ended.items()) if generation >= held.objects[key].generation}


def brought_back(held: Snapshot, ended: dict[ObjectKey, int]) -> Snapshot:
    """With a new generation for those, above the one they ended with."""
    again = {key: msgspec.structs.replace(held.objects[key], generation=generation + 1) for key, generation in ended.items()}
    return msgspec.structs.replace(held, objects={**held.objects, **again})


def _object_problems(key: ObjectKey, stored: DesiredObject) -> Iterator[str]:
    if key.kind not in DESIRED_KINDS:
        yield f"{key}: kind {key.kind!r} is not one of {', '.join(DESIRED_KINDS)}"
        return
    yield from _number(f"{key}: generation", stored.generation, 1)
    yield from _number(f"{key}: revision", stored.revision, 0)
    for document in (stored.manifest, stored.previous):
        if document is None:
            continue
        try:
            manifest = parse_document(document)
        except YardError as error:
            yield f"{key}: {error.message}"
            continue
        if (manifest.kind, manifest.name) != key:
            yield f"{key}: its manifest is of {manifest.kind}/{manifest.name}; make them agree"


def _number(what: str, value: int, lowest: int) -> Iterable[str]:
    return () if lowest <= value < HIGHEST else (f"{what} is {value}; it must be from {lowest} to {HIGHEST - 1}",)
