"""What happened to a site: its audit stream (desired state) and its events stream (observed state), merged by time."""

from __future__ import annotations

import heapq
import json
from collections.abc import AsyncIterator, Mapping
from typing import cast

import msgspec

from gateway.state.store import SiteStore

EVENT_ENTRIES = 10_000
TOLD = 4
"""Changed fields in the message of one change; `detail` has all."""
LONGEST = 80
_BLOCK_MS = 2_000
_AUDIT_KINDS = {"switched": "route.switched", "rolled_back": "route.rolled_back"}

_Entry = tuple[bytes, Mapping[bytes, bytes]]


class Happening(msgspec.Struct, frozen=True):
    """`id` orders the entries of both streams: milliseconds and a number within them, as Redis gives them."""

    id: str
    time_unix: float
    kind: str
    subject: str
    message: str
    actor: str
    detail: str  # JSON object, or empty


class History:
    def __init__(self, store: SiteStore) -> None:
        self._store = store
        self._streams = {store.keys.audit: _of_audit, store.keys.events: _of_event}

    async def record(self, kind: str, subject: str, message: str, actor: str, detail: str = "") -> None:
        fields = {"kind": kind, "subject": subject, "message": message, "actor": actor, "detail": detail}
        await self._store.redis.xadd(self._store.keys.events, fields, maxlen=EVENT_ENTRIES, approximate=True)  # type: ignore[arg-type]

    async def read(self, last: int, *, follow: bool) -> AsyncIterator[Happening]:
        """The last entries, oldest first; with `follow`, then new ones as they come. Redis errors come out as they are."""
        positions: dict[str, bytes] = {}
        past: list[tuple[tuple[int, int], Happening]] = []
        for key, convert in self._streams.items():
            entries = cast("list[_Entry]", await self._store.redis.xrevrange(key, count=max(last, 1)))
            positions[key] = entries[0][0] if entries else b"0-0"
            past += [(_order(entry[0]), convert(entry)) for entry in entries]
        for _, happening in heapq.nlargest(last, past, key=lambda item: item[0])[::-1]:
            yield happening
        while follow:
            answer = await self._store.waits.xread(positions, count=1000, block=_BLOCK_MS)  # type: ignore[arg-type]
            fresh: list[tuple[tuple[int, int], Happening]] = []
            for raw_key, entries in _streams_of(answer):
                key = raw_key.decode()
                positions[key] = entries[-1][0]
                fresh += [(_order(entry[0]), self._streams[key](entry)) for entry in entries]
            for _, happening in sorted(fresh, key=lambda item: item[0]):
                yield happening


def _streams_of(answer: object) -> list[tuple[bytes, list[_Entry]]]:
    """RESP2 gives pairs, RESP3 a map of lists of entries."""
    if isinstance(answer, dict):
        return [
            (key, entries[0] if len(entries) == 1 and isinstance(entries[0], list) else entries)
            for key, entries in answer.items()
        ]
    return list(answer) if isinstance(answer, list) else []


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _of_event(entry: _Entry) -> Happening:
    text = {key.decode(): value.decode() for key, value in entry[1].items()}
    return Happening(
        id=entry[0].decode(),
        time_unix=_order(entry[0])[0] / 1000,
        kind=text.get("kind", ""),
        subject=text.get("subject", ""),
        message=text.get("message", ""),
        actor=text.get("actor", ""),
        detail=text.get("detail", ""),
    )


def _of_audit(entry: _Entry) -> Happening:
    text = {key.decode(): value.decode() for key, value in entry[1].items()}
    action = text["action"]
    from_generation, to_generation = int(text["generation_from"]), int(text["generation_to"])
    before, after = (_spec(text[side]) for side in ("from", "to"))
    change = f"generation {from_generation} → {to_generation}" if from_generation else f"generation {to_generation}"
    changes = [] if action == "deleted" else changed_fields(before, after)
    told = (
        ", ".join(f"{'' if path == 'targets' else f'{path} '}{old} → {new}" for path, old, new in changes[:TOLD])
        if before
        else ""
    )
    more = f" and {len(changes) - TOLD} more" if before and len(changes) > TOLD else ""
    moved = f"{told}{more}, " if told else ""
    return Happening(
        id=entry[0].decode(),
        time_unix=_order(entry[0])[0] / 1000,
        kind=_AUDIT_KINDS.get(action, f"object.{action}"),
        subject=f"{text['kind']}/{text['name']}",
        message=f"{action.replace('_', ' ')}: {moved}{change}",
        actor=text["actor"],
        detail=json.dumps(
            {
                "revision": int(text["revision"]),
                "from": from_generation,
                "to": to_generation,
                "changes": [{"field": path, "from": old, "to": new} for path, old, new in changes],
            }
        ),
    )


def _spec(stored: str) -> dict[str, object]:
    return json.loads(stored).get("manifest", {}).get("spec", {}) if stored else {}


def changed_fields(before: object, after: object, path: str = "") -> list[tuple[str, str, str]]:
    """(field, from, to) of what differs, as text. Hashes of keys are counted and not shown (rule 15)."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        inner = ((f"{path}.{name}" if path else name, before.get(name), after.get(name)) for name in names)
        return [change for name, old, new in inner for change in changed_fields(old, new, name)]
    if before == after:
        return []
    return [(path, _short(path, before), _short(path, after))]


def _short(path: str, value: object) -> str:
    if value is None:
        return "nothing"
    if path.endswith("key_hashes") and isinstance(value, list):
        return f"{len(value)} keys"
    if path == "targets" and isinstance(value, list):
        targets = [(str(target.get("model")), target.get("weight")) for target in value if isinstance(target, dict)]
        return ", ".join(model if len(targets) == 1 or weight is None else f"{model}:{weight}" for model, weight in targets)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
