"""The admin service: what ops call, and what the `yard` command is a client of."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import msgspec
from google.protobuf.message import Message

from gateway.api.config import DESIRED_KINDS
from gateway.api.errors import ErrorCode, YardError, invalid, not_found, shortened, unavailable
from gateway.api.nesting import within
from gateway.api.proto import admin_pb2 as pb
from gateway.api.proto.admin_pb2_grpc import AdminServicer
from gateway.api.records import DesiredObject, PoolRecord, SiteStatus
from gateway.api.runtime import Runtime
from gateway.controller.footprints import Footprints
from gateway.controller.pool_restarts import notes, pool_spec
from gateway.servers.admin_describe import describe, route_statuses
from gateway.servers.admin_guard import actor_of
from gateway.servers.admin_plan import Planner, after_writes
from gateway.servers.grpc_errors import abort
from gateway.servers.residency import refuse_unmanaged, set_residency
from gateway.state.connection import LOST, refused
from gateway.state.diff import yaml_diff
from gateway.state.edits import Put, Write, apply_edit, delete_edit, rollback_edit, switch_edit
from gateway.state.footprint_record import load_footprints
from gateway.state.history import History
from gateway.state.key_gate import first_keys, kept_closed
from gateway.state.node_gate import held
from gateway.state.placement_record import load_placement
from gateway.state.pool_gate import guarded
from gateway.state.restoring import brought_back, checked, deleted_since, read_backup
from gateway.state.route_gate import Readiness, gated
from gateway.state.snapshot import Backup, ObjectKey, Observed, Snapshot
from gateway.state.store import SiteStore
from gateway.state.stranding import not_stranding
from gateway.state.view import SiteView
from placement.types import PlacedGroup

DEFAULT_EVENTS = 50
KEYS_NOTE = "from now on every request needs `authorization: Bearer KEY` with a key of a tenant; until now none did"
MAX_MANIFEST_CHARACTERS = 2**18
MAX_MANIFEST_DEPTH = 32

Context = grpc.aio.ServicerContext
Edit = Callable[[Snapshot], Sequence[Write]]
Method = TypeVar("Method", bound=Callable[..., Awaitable[object]])


def _answering(method: Method) -> Method:
    """Turns the errors of a call into its status."""

    @functools.wraps(method)
    async def answer(self: AdminService, request: Message, context: Context) -> object:
        try:
            return await method(self, request, context)
        except YardError as error:
            await abort(context, error, degraded=self.view.degraded)
        except LOST as error:
            await abort(context, refused(error, "the call"), degraded=True)

    return cast("Method", answer)


class AdminService(AdminServicer):
    """Reads come from the store, or without it from the last snapshot of this gateway (then `modelyard-degraded` is set in
    the trailing metadata); changes are refused without it (rule 12)."""

    def __init__(self, store: SiteStore, view: SiteView, runtime: Runtime) -> None:
        self.view = view
        self._store = store
        self._site = runtime.site
        self._ray_grows = runtime.ray_grows
        self._secret = runtime.secret
        self._history = History(store)
        self._planner = Planner(Path(runtime.cache_dir))

    @_answering
    async def Apply(self, request: pb.ApplyRequest, context: Context) -> pb.ApplyResponse:
        self._check_store()
        puts = [_put(item) for item in request.objects]
        plain: Edit = functools.partial(apply_edit, puts=puts)
        opened: frozenset[ObjectKey] = frozenset()

        def edit(snapshot: Snapshot) -> Sequence[Write]:
            nonlocal opened
            writes = plain(snapshot)
            opened = first_keys(snapshot, writes)
            return writes

        observed = await self._store.observed()
        change: Edit = edit
        if not request.force:
            change = self._safe(edit, observed)
        commit = await self._store.transact(change, _actor(context, self.view))
        return pb.ApplyResponse(
            changes=[_change(write, observed.pools, opened) for write in commit.writes], revision=commit.revision
        )

    @_answering
    async def Plan(self, request: pb.ApplyRequest, context: Context) -> pb.PlanResponse:
        snapshot, observed = await self._read(context)
        edit: Edit = functools.partial(apply_edit, puts=[_put(item) for item in request.objects])
        writes = (edit if request.force else self._safe(edit, observed))(snapshot)
        documents = {write.key: write.document for write in writes if write.action != "unchanged"}
        placements = await self._planner.plan(snapshot, after_writes(snapshot, documents), observed.pools, *await self._known())
        return pb.PlanResponse(
            changes=[_change(write, observed.pools, first_keys(snapshot, writes)) for write in writes], placements=placements
        )

    @_answering
    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        if request.kind:
            _check_kind(request.kind)
        snapshot, _ = await self._read(context)
        found = [
            _object(stored)
            for key, stored in sorted(snapshot.objects.items(), key=lambda item: (DESIRED_KINDS.index(item[0].kind), item[0]))
            if request.kind in ("", key.kind) and request.name in ("", key.name)
        ]
        if request.name and not found:
            raise _missing(snapshot, request.kind, request.name)
        return pb.GetResponse(objects=found, revision=snapshot.revision)

    @_answering
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        self._check_store()
        _check_kind(request.kind)
        key = ObjectKey(request.kind, request.name)
        edit: Edit = functools.partial(delete_edit, key=key, force=request.force)
        if not request.force:
            observed = await self._store.observed()
            edit = kept_closed(not_stranding(edit, observed.pools, observed.gateways))
        commit = await self._store.transact(edit, _actor(context, self.view))
        return pb.DeleteResponse(change=_change(commit.writes[0]))

    @_answering
    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        _check_kind(request.kind)
        snapshot, observed = await self._read(context)
        stored = snapshot.objects.get(ObjectKey(request.kind, request.name))
        if stored is None:
            raise _missing(snapshot, request.kind, request.name)
        plain, reasons = describe(stored, snapshot, observed)
        if stored.kind == "Model":
            reasons += await self._planner.why(stored.name, snapshot, observed.pools, *await self._known())
        return pb.DescribeResponse(object=_object(stored), observed_json=json.dumps(plain), reasons=reasons)

    @_answering
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        snapshot, observed = await self._read(context)
        status = SiteStatus(
            site=self._site,
            revision=snapshot.revision,
            redis="degraded" if self.view.degraded else "ok",
            pools=tuple(observed.pools[name] for name in sorted(observed.pools)),
            gateways=tuple(observed.gateways[name] for name in sorted(observed.gateways)),
            controller=observed.controller,
            models=tuple(stored for key, stored in sorted(snapshot.objects.items()) if key.kind == "Model"),
            routes=route_statuses(snapshot, observed),
            awaited=tuple(sorted({key.name for key in snapshot.objects if key.kind == "Pool"} - observed.pools.keys())),
        )
        return pb.StatusResponse(status_json=msgspec.json.encode(status).decode())

    @_answering
    async def SwitchRoute(self, request: pb.SwitchRouteRequest, context: Context) -> pb.SwitchRouteResponse:
        edit = functools.partial(switch_edit, route=request.route, to_model=request.to_model, generation=request.generation)
        return await self._flip(edit, context, force=request.force)

    @_answering
    async def RollbackRoute(self, request: pb.RollbackRouteRequest, context: Context) -> pb.SwitchRouteResponse:
        return await self._flip(functools.partial(rollback_edit, route=request.route), context, force=request.force)

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        try:
            async for item in self._history.read(request.last or DEFAULT_EVENTS, follow=request.follow):
                yield pb.Event(
                    id=item.id,
                    time_unix=item.time_unix,
                    kind=item.kind,
                    subject=item.subject,
                    message=item.message,
                    actor=item.actor,
                    detail_json=item.detail,
                )
        except LOST as error:
            await abort(context, refused(error, "the events"), degraded=True)

    @_answering
    async def Backup(self, request: pb.BackupRequest, context: Context) -> pb.BackupResponse:
        snapshot, _ = await self._read(context)
        backup = Backup.of(self.view.desired if self.view.replaced else snapshot)
        return pb.BackupResponse(
            snapshot_json=msgspec.json.encode(backup).decode(), revision=backup.revision, objects=len(backup.objects)
        )

    @_answering
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        held = read_backup(request.snapshot_json) if request.snapshot_json else self.view.desired
        if not held.revision:
            raise YardError(
                ErrorCode.CONFLICT, "this gateway holds no state of the site; ask one that does, or give a file of `yard backup`"
            )
        if request.discard:
            await self._store.give_up(self.view.desired, _actor(context, self.view))
            return pb.RestoreResponse(revision=await self._store.revision())
        skipped: dict[ObjectKey, int] = {}
        if request.snapshot_json:
            stored = await self._store.snapshot()
            skipped = deleted_since(held, stored)
            if request.force:
                held, skipped = brought_back(held, skipped), {}
            held = checked(held, stored, force=request.force)
        written = await self._store.restore(held, _actor(context, self.view))
        return pb.RestoreResponse(
            written=written,
            revision=await self._store.revision(),
            skipped=[f"{key} (generation {generation})" for key, generation in skipped.items()],
        )

    @_answering
    async def SetResidency(self, request: pb.SetResidencyRequest, context: Context) -> pb.SetResidencyResponse:
        snapshot, observed = await self._read(context)
        refuse_unmanaged(snapshot, request.model)
        states = await set_residency(observed.pools.values(), self._secret, request.model, request.residency)
        return pb.SetResidencyResponse(states=states)

    def _check_store(self) -> None:
        """A change to a store that was emptied would be the beginning of another site."""
        if self.view.replaced:
            raise unavailable(f"changes are refused: {self.view.degraded_reason}", 2.0)

    async def _flip(self, edit: Edit, context: Context, *, force: bool) -> pb.SwitchRouteResponse:
        self._check_store()
        if not force:
            edit = gated(edit, await self._readiness(), explicit=True)
        commit = await self._store.transact(edit, _actor(context, self.view))
        return pb.SwitchRouteResponse(change=_change(commit.writes[0]), committed_unix=time.time())

    async def _known(self) -> tuple[tuple[PlacedGroup, ...] | None, Footprints]:
        """The stored placement, and what loads took. None also without the store: then what the pools hold is taken for it."""
        try:
            return await load_placement(self._store), await load_footprints(self._store)
        except LOST:
            return None, ()

    async def _readiness(self) -> Readiness:
        observed = await self._store.observed()
        return Readiness(observed.pools.values(), observed.gateways.values())

    async def _read(self, context: Context) -> tuple[Snapshot, Observed]:
        view = self.view
        try:
            snapshot, observed = await self._store.snapshot(), await self._store.observed()
        except LOST as error:
            if not view.revision:
                raise refused(error, "the site has not been read yet") from error
            context.set_trailing_metadata((("modelyard-degraded", "true"),))
            return view.desired, Observed(view.pools, view.gateways, view.controller)
        if view.degraded:  # the heartbeats of a store that takes none expire
            pools, gateways = {**view.pools, **observed.pools}, {**view.gateways, **observed.gateways}
            observed = Observed(pools, gateways, observed.controller or view.controller)
        return snapshot, observed

    def _safe(self, edit: Edit, observed: Observed) -> Edit:
        """With all that an apply makes sure of, unless it is forced."""
        pools, gateways, controller = observed.pools, observed.gateways, observed.controller
        ready = gated(edit, Readiness(pools.values(), gateways.values()), explicit=False)
        safe = kept_closed(not_stranding(guarded(ready, pools), pools, gateways))
        return safe if self._ray_grows or controller is None else held(safe, controller.nodes)


def _put(item: pb.Object) -> Put:
    what = f"manifest_json of {shortened(item.kind)}/{shortened(item.name)}"
    if len(item.manifest_json) > MAX_MANIFEST_CHARACTERS:
        raise invalid(f"{what} has more than {MAX_MANIFEST_CHARACTERS} characters", "objects.manifest_json")
    try:
        document: Any = msgspec.json.decode(item.manifest_json)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{what} is not JSON: {error}", "objects.manifest_json") from error
    if not isinstance(document, dict):
        raise invalid(f"{what} is not an object", "objects.manifest_json")
    if not within(document, MAX_MANIFEST_DEPTH):
        raise invalid(f"{what} is nested more than {MAX_MANIFEST_DEPTH} levels deep", "objects.manifest_json")
    metadata = document.get("metadata")
    inner = (document.get("kind"), metadata.get("name") if isinstance(metadata, dict) else None)
    if (item.kind and item.kind != inner[0]) or (item.name and item.name != inner[1]):
        raise invalid(
            f"the object says {item.kind}/{item.name}, its manifest {inner[0]}/{inner[1]}; make them agree", "objects.name"
        )
    return Put(document, item.generation)


def _change(write: Write, pools: Mapping[str, PoolRecord] | None = None, opened: Collection[ObjectKey] = ()) -> pb.Change:
    before = write.before.manifest if write.before else None
    action = {"switched": "changed", "rolled_back": "changed"}.get(write.action, write.action)
    return pb.Change(
        kind=write.key.kind,
        name=write.key.name,
        action=action,
        generation=write.generation,
        diff=yaml_diff(before, write.document, str(write.key)),
        notes=[*_notes(write, pools or {}), *(KEYS_NOTE for key in opened if key == write.key)],
    )


def _notes(write: Write, pools: Mapping[str, PoolRecord]) -> list[str]:
    """What follows from a change beyond the object itself."""
    before = pool_spec(write.before.manifest) if write.before else None
    after, running = pool_spec(write.document), pools.get(write.key.name)
    return notes(before, after, running) if before and after and running else []


def _object(stored: DesiredObject) -> pb.Object:
    return pb.Object(kind=stored.kind, name=stored.name, generation=stored.generation, manifest_json=json.dumps(stored.manifest))


def _missing(snapshot: Snapshot, kind: str, name: str) -> YardError:
    known = sorted(str(key) if not kind else key.name for key in snapshot.objects if kind in ("", key.kind))
    return not_found(f"{kind or 'object'} `{name}` does not exist; there are: {', '.join(known) or 'none'}")


def _check_kind(kind: str) -> None:
    if kind not in DESIRED_KINDS:
        raise invalid(f"kind {kind!r} is not one of {', '.join(DESIRED_KINDS)}", "kind")


def _actor(context: Context, view: SiteView) -> str:
    return actor_of(context.invocation_metadata() or (), context.peer(), view)
