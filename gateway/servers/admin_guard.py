"""Who may call the admin service, and what of Triton's protocol leads to it (rule 15)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import grpc

from gateway.api.proto import admin_pb2, kserve_pb2
from gateway.api.runtime import SECRET_METADATA_KEY

_PREFIX = f"/{admin_pb2.DESCRIPTOR.services_by_name['Admin'].full_name}/"
_KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_METHODS = frozenset(f"/{_KSERVE}/{method}" for method in ("RepositoryModelLoad", "RepositoryModelUnload"))
_REFUSAL = (
    "admin calls to a gateway that is reachable from other machines need the site's secret in the metadata key "
    f"`{SECRET_METADATA_KEY}`; `yard` sends it when it runs on a node of the site"
)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class AdminGuard(grpc.aio.ServerInterceptor):
    """Lets admin calls through with the site's secret. Only put before servers that are not bound to loopback."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse)
        self._refuse_stream = grpc.unary_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if not (method.startswith(_PREFIX) or method in _METHODS) or handler is None or self._knows(handler_call_details):
            return handler
        return self._refuse_stream if handler.response_streaming else self._refuse

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._secret:
            return False
        for key, value in details.invocation_metadata or ():
            if key == SECRET_METADATA_KEY:
                given = value if isinstance(value, bytes) else value.encode()
                return hmac.compare_digest(given, self._secret)
        return False


async def _refuse(request: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
