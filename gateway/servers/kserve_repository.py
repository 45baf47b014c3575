"""Triton's model repository: load and unload of models by the admin service, as `yard` does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc

from gateway.api.config import API_VERSION
from gateway.api.errors import invalid, not_found, shortened, unavailable
from gateway.api.proto import admin_pb2
from gateway.api.proto import kserve_pb2 as pb
from gateway.api.proto.admin_pb2_grpc import AdminServicer
from gateway.api.records import GroupRecord
from gateway.servers import kserve_model
from gateway.servers.grpc_call import headers
from gateway.servers.kserve_request import VERSION
from gateway.state.snapshot import ObjectKey
from gateway.state.view import SiteView

WAIT_S = 600.0
"""For a load whose caller sets no deadline."""
UNPLACED_S = 10.0
"""How long a model may be in no pool before that is the answer: the controller makes room in the meantime."""
UNLOAD_HEADER = "modelyard-unload"
"""Metadata or parameter of an unload: `park` (the default) or `remove`. Triton's clients cannot send the parameter."""

Context = grpc.aio.ServicerContext


class KserveRepository:
    """Load wakes what is parked, and places what is not; with the parameter `config`, a Model's spec or its whole manifest as
    JSON, also what the site does not have yet. Unload parks, or removes from its pools and keeps the manifest. Both end when it
    is done."""

    def __init__(self, view: SiteView, admin: AdminServicer | None) -> None:
        self._view = view
        self.admin = admin

    def index(self, *, ready: bool) -> pb.RepositoryIndexResponse:
        entries = []
        for model in sorted(self._view.models):
            state, reason = kserve_model.state(self._groups(model), self._unplaced(model))
            if state == "READY" or not ready:
                entries.append(pb.RepositoryIndexResponse.ModelIndex(name=model, version=VERSION, state=state, reason=reason))
        return pb.RepositoryIndexResponse(models=entries)

    async def load(self, request: pb.RepositoryModelLoadRequest, context: Context) -> None:
        model = request.model_name
        if "config" in request.parameters:
            await self._apply(_document(model, request.parameters["config"].string_param), context)
        elif not self._spec(model).get("replicas", 1):
            await self._apply(self._with_replicas(model, 1), context)
        elif self._is("parked", model) and not self._is("ready", model):
            await self._set_residency(model, "resident", context)
        await self._until_loaded(model, context)

    async def unload(self, request: pb.RepositoryModelUnloadRequest, context: Context) -> None:
        model = request.model_name
        self._spec(model)
        how = request.parameters[UNLOAD_HEADER].string_param if UNLOAD_HEADER in request.parameters else ""
        match how or headers(context).get(UNLOAD_HEADER, "park"):
            case "park":
                if self._is("ready", model):
                    await self._set_residency(model, "parked", context)
                await self._until(lambda: self._is_parked(model), context, f"model `{model}` to be parked")
            case "remove":
                await self._apply(self._with_replicas(model, 0), context)
                await self._until(lambda: not self._groups(model), context, f"model `{model}` to leave its pools")
            case other:
                raise invalid(f"{UNLOAD_HEADER} is {shortened(other)!r}; it must be park or remove", UNLOAD_HEADER)

    # ---------------------------------------------------------------- changes

    async def _apply(self, document: dict[str, Any], context: Context) -> None:
        name = document["metadata"]["name"]
        item = admin_pb2.Object(kind="Model", name=name, manifest_json=json.dumps(document))
        answer = await self._service.Apply(admin_pb2.ApplyRequest(objects=[item]), context)
        await self._until(lambda: self._view.revision >= answer.revision, context, "the change to reach this gateway")

    async def _set_residency(self, model: str, residency: str, context: Context) -> None:
        await self._service.SetResidency(admin_pb2.SetResidencyRequest(model=model, residency=residency), context)

    @property
    def _service(self) -> AdminServicer:
        if self.admin is None:
            raise unavailable("this gateway has no admin service, so nothing can be loaded or unloaded here")
        return self.admin

    def _with_replicas(self, model: str, replicas: int) -> dict[str, Any]:
        document = self._view.desired.objects[ObjectKey("Model", model)].manifest
        return {**document, "spec": {**document["spec"], "replicas": replicas}}

    def _spec(self, model: str) -> dict[str, Any]:
        stored = self._view.desired.objects.get(ObjectKey("Model", model))
        if stored is None:
            known = ", ".join(f"`{name}`" for name in sorted(self._view.models)[:8])
            raise not_found(
                f"there is no model `{shortened(model)}`; there are {known or 'none'}; load one with the parameter `config`, "
                "its spec as JSON"
            )
        return stored.manifest["spec"]

    # ---------------------------------------------------------------- waiting

    async def _until_loaded(self, model: str, context: Context) -> None:
        began = asyncio.get_running_loop().time()

        def loaded() -> bool:
            groups = self._groups(model)
            if any(group.state == "ready" for group in groups):
                return True
            if groups and all(group.state == "failed" for group in groups):
                raise unavailable(f"model `{model}` failed to load: {groups[0].reason}")
            reasons = self._unplaced(model)
            if not groups and reasons and asyncio.get_running_loop().time() - began > UNPLACED_S:
                raise unavailable(f"model `{model}` fits nowhere: {'; '.join(reasons)}")
            return False

        await self._until(loaded, context, f"model `{model}` to be ready")

    async def _until(self, condition: Callable[[], bool], context: Context, what: str) -> None:
        """Looks after each change of the site's view."""
        changed = asyncio.Event()
        unsubscribe = self._view.subscribe(changed.set)
        remaining_s = context.time_remaining()
        try:
            async with asyncio.timeout(WAIT_S if remaining_s is None else remaining_s):
                while not condition():
                    changed.clear()
                    await changed.wait()
        except TimeoutError as error:
            raise unavailable(f"waited in vain for {what}; `yard ps` shows where it is") from error
        finally:
            unsubscribe()

    def _is(self, state: str, model: str) -> bool:
        return any(group.state == state for group in self._groups(model))

    def _is_parked(self, model: str) -> bool:
        return all(group.state != "ready" and group.residency != "parking" for group in self._groups(model))

    def _groups(self, model: str) -> list[GroupRecord]:
        return [group for _, group in self._view.groups(model)]

    def _unplaced(self, model: str) -> tuple[str, ...]:
        controller = self._view.controller
        return () if controller is None else controller.unplaced.get(model, ())


def _document(model: str, config: str) -> dict[str, Any]:
    try:
        given = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the parameter config is not JSON: {error}", "config") from error
    if not isinstance(given, dict):
        raise invalid("the parameter config must be a JSON object: a Model's spec or its manifest", "config")
    if "kind" not in given:
        return {"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": model}, "spec": given}
    metadata = given.get("metadata")
    if given["kind"] != "Model" or not isinstance(metadata, dict) or metadata.get("name") != model:
        raise invalid(f"the parameter config must be the manifest of Model `{shortened(model)}`", "config")
    return given
