"""Who may call the admin service, and what of Triton's protocol leads to it; and as whom (rule 15)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable

import grpc

from gateway.admission.caller import AUTHORIZATION, key_owner
from gateway.api.config import Role
from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto import admin_pb2, kserve_pb2
from gateway.api.runtime import SECRET_METADATA_KEY
from gateway.servers.grpc_errors import abort
from gateway.state.view import SiteView

ACTOR_METADATA_KEY = "modelyard-actor"
ROLES: tuple[Role, ...] = ("infer", "operate", "admin")
"""Each may what those before it may."""

_PREFIX = f"/{admin_pb2.DESCRIPTOR.services_by_name['Admin'].full_name}/"
_KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_METHODS = frozenset(f"/{_KSERVE}/{method}" for method in ("RepositoryModelLoad", "RepositoryModelUnload"))
_OPERATE = {"Plan", "Get", "Describe", "Status", "SwitchRoute", "RollbackRoute", "Events", "SetResidency"}
"""Of the admin service: what people on duty need. All others change what the site is made of, or show all of it: admin."""

Metadata = Iterable[tuple[str, str | bytes]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class AdminAccess:
    """Decides by the site's secret, else by an API key of a tenant, else by where the gateway listens."""

    def __init__(self, secret: str, view: SiteView | None, *, loopback: bool) -> None:
        self._secret = secret.encode()
        self._view = view
        self._loopback = loopback

    def check(self, metadata: Metadata, role: Role) -> str:
        """Who it is. YardError(UNAUTHENTICATED, DENIED).

        1. The site's secret is everybody's who may read the site's files.
        2. A key must be known, and its tenant's role must reach; also on loopback, where none is needed.
        3. Without credentials: only on loopback.
        """
        given = {key: value if isinstance(value, str) else value.decode("latin-1") for key, value in metadata}
        secret = given.get(SECRET_METADATA_KEY, "").encode("latin-1", "replace")
        if self._secret and secret and hmac.compare_digest(secret, self._secret):
            return "the site"
        if self._view is not None and given.get(AUTHORIZATION):
            tenant = key_owner(self._view, given[AUTHORIZATION])
            has = self._view.tenants[tenant].role
            if ROLES.index(has) < ROLES.index(role):
                raise YardError(
                    ErrorCode.DENIED,
                    f"this needs the role {role}, tenant `{tenant}` has {has}; see spec.role of the Tenant",
                    field=AUTHORIZATION,
                )
            return f"tenant {tenant}"
        if self._loopback:
            return ""
        raise YardError(
            ErrorCode.UNAUTHENTICATED,
            "admin calls to a gateway that is reachable from other machines need `authorization: Bearer KEY` with a key of a "
            "tenant whose role is operate or admin, or the site's secret in the metadata key "
            f"`{SECRET_METADATA_KEY}` (`yard` sends it on a node of the site)",
            field=AUTHORIZATION,
        )


class AdminGuard(grpc.aio.ServerInterceptor):
    """Lets through those calls of the admin service that `access` allows, and all of other services."""

    def __init__(self, access: AdminAccess) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if not (method.startswith(_PREFIX) or method in _METHODS) or handler is None:
            return handler
        try:
            self._access.check(handler_call_details.invocation_metadata or (), role_of(method))
        except YardError as error:
            return _refusal(error, streams=handler.response_streaming)
        return handler


def role_of(method: str) -> Role:
    return "operate" if method.removeprefix(_PREFIX) in _OPERATE else "admin"


def actor_of(metadata: Metadata, peer: str, view: SiteView) -> str:
    """Whom the audit stream names: the owner of the key; `for` whom it says it acts, which nobody checks."""
    given = {key: value if isinstance(value, str) else value.decode(errors="replace") for key, value in metadata}
    claimed = given.get(ACTOR_METADATA_KEY, "")
    if given.get(AUTHORIZATION):
        tenant = f"tenant {key_owner(view, given[AUTHORIZATION])}"
        return f"{tenant} for {claimed}" if claimed else tenant
    return claimed or f"someone at {peer}"


def _refusal(error: YardError, *, streams: bool) -> grpc.RpcMethodHandler:
    async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.unary_stream_rpc_method_handler(refuse) if streams else grpc.unary_unary_rpc_method_handler(refuse)
