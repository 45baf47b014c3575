"""The admin and inference services of a site, as the command line calls them. Every failure arrives as a YardError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import msgspec

from gateway.api.errors import GRPC_STATUS, ErrorCode, YardError
from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import admin_pb2 as admin
from gateway.api.proto import inference_pb2 as inference
from gateway.api.proto.admin_pb2_grpc import AdminStub
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.records import SiteStatus
from gateway.api.runtime import SECRET_METADATA_KEY
from gateway.site.client_tls import ClientTls

CALL_TIMEOUT_S = 15.0
_CODES = {status: code for code, status in GRPC_STATUS.items()} | {
    grpc.StatusCode.ABORTED: ErrorCode.CONFLICT,
    grpc.StatusCode.ALREADY_EXISTS: ErrorCode.CONFLICT,
    # Nothing here cancels a call and then asks how it ended: the gateway did, which stops.
    grpc.StatusCode.CANCELLED: ErrorCode.UNAVAILABLE,
}

_Answer = TypeVar("_Answer")


class SiteClient:
    """`secret`: the site's own, where the caller may read it; the admin side of a site beyond loopback asks for it, or for
    an API key of a tenant that may operate it."""

    def __init__(
        self, address: str, secret: str | None = None, *, tls: ClientTls | None = None, api_key: str | None = None
    ) -> None:
        self.address = address
        self._metadata = ((SECRET_METADATA_KEY, secret),) if secret else ()
        if api_key:
            self._metadata += (("authorization", f"Bearer {api_key}"),)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=[*CLIENT_OPTIONS, *tls.options])
        self._admin = AdminStub(self._channel)
        self._inference = InferenceStub(self._channel)

    def __enter__(self) -> SiteClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def apply(self, objects: Sequence[admin.Object], *, force: bool = False) -> admin.ApplyResponse:
        return self._call(self._admin.Apply, admin.ApplyRequest(objects=objects, force=force))

    def plan(self, objects: Sequence[admin.Object], *, force: bool = False) -> admin.PlanResponse:
        return self._call(self._admin.Plan, admin.ApplyRequest(objects=objects, force=force))

    def get(self, kind: str = "", name: str = "") -> admin.GetResponse:
        return self._call(self._admin.Get, admin.GetRequest(kind=kind, name=name))

    def describe(self, kind: str, name: str) -> admin.DescribeResponse:
        return self._call(self._admin.Describe, admin.DescribeRequest(kind=kind, name=name))

    def delete(self, kind: str, name: str, *, force: bool = False) -> admin.Change:
        return self._call(self._admin.Delete, admin.DeleteRequest(kind=kind, name=name, force=force)).change

    def status(self) -> SiteStatus:
        answer = self._call(self._admin.Status, admin.StatusRequest())
        return msgspec.json.decode(answer.status_json, type=SiteStatus)

    def switch_route(self, route: str, model: str, *, force: bool = False) -> admin.SwitchRouteResponse:
        request = admin.SwitchRouteRequest(route=route, to_model=model, force=force)
        return self._call(self._admin.SwitchRoute, request)

    def rollback_route(self, route: str, *, force: bool = False) -> admin.SwitchRouteResponse:
        return self._call(self._admin.RollbackRoute, admin.RollbackRouteRequest(route=route, force=force))

    def backup(self) -> admin.BackupResponse:
        return self._call(self._admin.Backup, admin.BackupRequest())

    def restore(self, snapshot_json: str = "", *, discard: bool = False, force: bool = False) -> admin.RestoreResponse:
        request = admin.RestoreRequest(snapshot_json=snapshot_json, discard=discard, force=force)
        return self._call(self._admin.Restore, request)

    def set_residency(self, model: str, residency: str) -> dict[str, str]:
        answer = self._call(self._admin.SetResidency, admin.SetResidencyRequest(model=model, residency=residency))
        return dict(answer.states)

    def events(self, *, follow: bool, last: int) -> Iterator[admin.Event]:
        timeout_s = None if follow else CALL_TIMEOUT_S
        return self._stream(self._admin.Events, admin.EventsRequest(follow=follow, last=last), timeout_s)

    def chat(self, request: inference.ChatRequest, timeout_s: float) -> inference.GenerateResponse:
        return self._call(self._inference.Chat, request, timeout_s)

    def chat_stream(self, request: inference.ChatRequest, timeout_s: float) -> Iterator[inference.GenerateChunk]:
        return self._stream(self._inference.ChatStream, request, timeout_s)

    def generate(self, request: inference.GenerateRequest, timeout_s: float) -> inference.GenerateResponse:
        return self._call(self._inference.Generate, request, timeout_s)

    def tokenize(self, request: inference.TokenizeRequest) -> inference.TokenizeResponse:
        return self._call(self._inference.Tokenize, request)

    def generate_stream(self, request: inference.GenerateRequest, timeout_s: float) -> Iterator[inference.GenerateChunk]:
        return self._stream(self._inference.GenerateStream, request, timeout_s)

    def _call(self, method: Callable[..., _Answer], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> _Answer:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _stream(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Iterator[Any]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _error(self, error: grpc.RpcError) -> YardError:
        status, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
        if status is grpc.StatusCode.UNIMPLEMENTED:
            return YardError(
                ErrorCode.UNAVAILABLE, f"{self.address} is no Modelyard gateway, or one of another version: {details}"
            )
        code = _CODES.get(status, ErrorCode.INTERNAL)
        if status is grpc.StatusCode.CANCELLED:
            details = f"{self.address} stops and ended the call; another gateway answers there in a moment if the site runs"
        if code is ErrorCode.UNAVAILABLE and "onnect" in details and "address" in details:
            details = f"no Modelyard answers at {self.address}; start it with `yard up`, or name another with --server HOST:PORT"
        if code is ErrorCode.UNAUTHENTICATED:
            details += "; `yard` sends the one of --api-key KEY or MODELYARD_API_KEY"
        if code is ErrorCode.DEADLINE:
            details = f"{self.address} did not answer in time: {details}"
        return YardError(code, details or f"{self.address} answered {status.name}")
