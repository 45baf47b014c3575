"""A pool is not taken on, or made larger, where no node of the site's Ray can hold it beside the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.api.config import PoolSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import NodeRecord
from gateway.state.edits import Write, parse_document, parsed_site
from gateway.state.snapshot import Snapshot

NEXT_STEP = "add a node, lower devices or memory, or use --force: the pool then waits for room"


def held(edit: Callable[[Snapshot], Sequence[Write]], nodes: Sequence[NodeRecord]) -> Callable[[Snapshot], Sequence[Write]]:
    """The same edit, refused with YardError(CONFLICT) that names the pools and what the nodes have."""

    def checked(snapshot: Snapshot) -> Sequence[Write]:
        writes = edit(snapshot)
        if found := no_room(snapshot, writes, nodes):
            raise YardError(ErrorCode.CONFLICT, "\n".join(found.values()) + f"\n{NEXT_STEP}", field="spec.devices")
        return writes

    return checked


def no_room(before: Snapshot, writes: Sequence[Write], nodes: Sequence[NodeRecord]) -> dict[str, str]:
    """By name of a new or larger pool, why it has no room. Without nodes nothing is known, and nothing is said."""
    if not nodes or not any(write.key.kind == "Pool" and write.action != "unchanged" for write in writes):
        return {}
    had = dict(_pools(before))
    after = had | dict(_written(writes))
    grown = {name: spec for name, spec in after.items() if name not in had or _asks_more(spec, had[name])}
    room = [_Room(node) for node in nodes]
    for name in sorted(after.keys() - grown.keys(), key=lambda name: -_needs(after[name])):
        _take(after[name], room)
    problems = {}
    for name in sorted(grown, key=lambda name: (-_needs(grown[name]), name)):
        if not _take(grown[name], room):
            problems[name] = _why(name, grown[name], room, nodes)
    return problems


class _Room:
    def __init__(self, node: NodeRecord) -> None:
        self.labels, self.free_mib, self.free_gpus = node.labels, node.pool_mib, node.gpus


def _pools(snapshot: Snapshot) -> Iterator[tuple[str, PoolSpec]]:
    for key, manifest in parsed_site(snapshot).items():
        if isinstance(manifest.spec, PoolSpec):
            yield key.name, manifest.spec


def _written(writes: Sequence[Write]) -> Iterator[tuple[str, PoolSpec]]:
    for write in writes:
        if write.key.kind == "Pool" and write.document is not None:
            spec = parse_document(write.document).spec
            assert isinstance(spec, PoolSpec)
            yield write.key.name, spec


def _needs(spec: PoolSpec) -> int:
    """MiB on one node for a cpu pool, which is one MPI world; GPUs, on any nodes, for another."""
    return spec.devices * ((spec.memory or 0) >> 20) if spec.device == "cpu" else spec.devices


def _asks_more(spec: PoolSpec, before: PoolSpec) -> bool:
    return spec.device != before.device or spec.node_labels != before.node_labels or _needs(spec) > _needs(before)


def _take(spec: PoolSpec, room: Sequence[_Room]) -> bool:
    needed, allowed = _needs(spec), [each for each in room if _fits_labels(spec, each.labels)]
    if spec.device == "cpu":
        # The fullest that takes it, so that a larger pool still finds the others.
        found = min((each for each in allowed if each.free_mib >= needed), key=lambda each: each.free_mib, default=None)
        if found is not None:
            found.free_mib -= needed
        return found is not None
    if sum(each.free_gpus for each in allowed) < needed:
        return False
    for each in sorted(allowed, key=lambda each: -each.free_gpus):
        taken = min(each.free_gpus, needed)
        each.free_gpus, needed = each.free_gpus - taken, needed - taken
    return True


def _fits_labels(spec: PoolSpec, labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in spec.node_labels.items())


def _why(name: str, spec: PoolSpec, room: Sequence[_Room], nodes: Sequence[NodeRecord]) -> str:
    where = f" with labels {spec.node_labels}" if spec.node_labels else ""
    allowed = [each for each in room if _fits_labels(spec, each.labels)]
    total = [node for node in nodes if _fits_labels(spec, node.labels)]
    if spec.device == "cuda":
        free, gpus = sum(each.free_gpus for each in allowed), sum(node.gpus for node in total)
        return f"Pool/{name} asks for {spec.devices} GPUs{where}; this site has {gpus}, and the other pools leave {free} of them"
    free, most = (max(sizes, default=0) for sizes in ([each.free_mib for each in allowed], [node.pool_mib for node in total]))
    return (
        f"Pool/{name} asks for {spec.devices} × {(spec.memory or 0) / 2**30:.1f} GiB on one node{where}; the largest node has "
        f"{most / 2**10:.1f} GiB, and the other pools leave at most {free / 2**10:.1f} GiB of a node"
    )
