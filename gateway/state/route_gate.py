"""A route flips only to targets that are ready at the capacity of the present ones (rule 8). Pure.

A parked group is not ready here: after the flip everybody would wait for its wake, and it may need the memory of the present
target, which is still busy. Whoever flips wakes it first (`yard wake`), or says --force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.api.config import ModelSpec, RouteSpec
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.api.records import GatewayRecord, GroupRecord, PoolRecord
from gateway.state.edits import Write, parse_document, targets_of
from gateway.state.servers import ELSEWHERE, server_groups
from gateway.state.snapshot import ObjectKey, Snapshot

_COMING = ("waiting", "loading", "checking")


class Readiness:
    """Worker groups of the site by model, as the pools report them; and servers that run elsewhere, as the gateways do."""

    def __init__(self, pools: Iterable[PoolRecord], gateways: Iterable[GatewayRecord] = ()) -> None:
        self._servers = server_groups(gateways)
        self._groups: dict[str, list[tuple[str, GroupRecord]]] = {
            model: [(ELSEWHERE, group)] for model, group in self._servers.items()
        }
        for pool in pools:
            for group in pool.groups:
                self._groups.setdefault(group.model, []).append((pool.pool, group))

    def ready(self, model: str) -> int:
        return sum(group.state == "ready" for _, group in self._groups.get(model, ()))

    def coming(self, model: str) -> int:
        return sum(group.state in _COMING or group.residency == "waking" for _, group in self._groups.get(model, ()))

    def is_server(self, model: str) -> bool:
        return model in self._servers

    def parked(self, model: str) -> int:
        return sum(group.state == "parked" for _, group in self._groups.get(model, ()))

    def answers(self, model: str) -> bool:
        """A request for it is answered, if need be after a wake."""
        return bool(self.ready(model) or self.parked(model))

    def story(self, model: str) -> str:
        groups = self._groups.get(model)
        if not groups:
            return "it is in no pool"
        return ", ".join(
            ("its server is " if pool == ELSEWHERE else "")
            + (group.residency or group.state)
            + ("" if pool == ELSEWHERE else f" in pool `{pool}`")
            + (f" ({group.reason})" if group.reason else "")
            for pool, group in groups
        )


def gated(
    edit: Callable[[Snapshot], Sequence[Write]], readiness: Readiness, *, explicit: bool
) -> Callable[[Snapshot], Sequence[Write]]:
    """The same edit, refused with YardError when a route would flip to less than what it has.

    `explicit`: the caller asks for just that flip (switch, rollback), so the target must be ready in any case. In an apply
    a route whose present targets serve nothing may be changed: nobody loses anything.
    """

    def checked(snapshot: Snapshot) -> Sequence[Write]:
        writes = edit(snapshot)
        models = {write.key.name: write.document for write in writes if write.key.kind == "Model"}
        for write in writes:
            if (
                write.key.kind == "Route"
                and write.before is not None
                and write.document is not None
                and write.action != "unchanged"
            ):
                before, after = _takers(write.before.manifest), _takers(write.document)
                if before != after:
                    _check(write.key, before, after, readiness, _replicas(snapshot, models, after), explicit=explicit)
        return writes

    return checked


def _takers(document: dict) -> Mapping[str, int]:
    """Model -> weight of what takes the traffic that no caller or prompt is special for: a canary of all callers, a rule for
    every prompt, else the targets."""
    manifest = parse_document(document)
    spec = manifest.spec
    assert isinstance(spec, RouteSpec)
    for rule in spec.rules:
        if rule.quality is None and (rule.min_prompt_tokens or 1) <= 1 and rule.max_prompt_tokens is None:
            return {rule.model: 100}
    if spec.canary is not None and spec.canary.percent == 100:
        return {spec.canary.model: 100}
    return targets_of(manifest)


def _check(
    key: ObjectKey,
    before: Mapping[str, int],
    after: Mapping[str, int],
    readiness: Readiness,
    replicas: int,
    *,
    explicit: bool,
) -> None:
    present = sum(readiness.ready(model) for model, weight in before.items() if weight)
    targets = [model for model, weight in after.items() if weight]
    ready = sum(readiness.ready(model) for model in targets)
    needed = max(present, 1) if explicit else present
    idle = [model for model in targets if present and not readiness.ready(model)]
    if ready >= needed and not idle:
        return
    if ready and not idle and any(readiness.is_server(model) and readiness.ready(model) for model in targets):
        return  # how much a server that runs elsewhere can do is not known here
    stories = "; ".join(f"`{model}`: {readiness.story(model)}" for model in targets)
    missing = f"{key} has {present} ready worker group(s) now and would have {ready}: {stories}"
    if ready + sum(readiness.coming(model) for model in targets) >= needed and any(readiness.coming(model) for model in targets):
        raise unavailable(f"{missing}; wait until it is ready, or use --force", 2.0)
    parked = [model for model in targets if readiness.parked(model)]
    if parked and ready + sum(map(readiness.parked, targets)) >= needed:
        wakes = " and ".join(f"`yard wake {model}`" for model in parked)
        raise YardError(ErrorCode.CONFLICT, f"{missing}; first {wakes}, or use --force", field=f"{key}: spec.targets")
    fix = f"raise the replicas of the target to {needed}" if replicas < needed else f"see `yard describe model {targets[0]}`"
    raise YardError(ErrorCode.CONFLICT, f"{missing}; {fix}, or use --force", field=f"{key}: spec.targets")


def _replicas(snapshot: Snapshot, applied: Mapping[str, dict | None], targets: Mapping[str, int]) -> int:
    total = 0
    for model, weight in targets.items():
        stored = snapshot.objects.get(ObjectKey("Model", model))
        document = applied.get(model) or (stored.manifest if stored else None)
        spec = parse_document(document).spec if document and weight else None
        total += spec.replicas if isinstance(spec, ModelSpec) else 0
    return total
