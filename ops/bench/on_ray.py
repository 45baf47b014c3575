"""A Ray of its own for `ops.bench.gateway`: a gateway as `yard up` deploys it, and a plain forwarder behind Serve's gRPC proxy.

`python -m ops.bench.on_ray DIRECTORY REDIS_URL ENGINE_ADDRESS GRPC_PORT` runs until its input ends, with what
`gateway.site.ray_head` gives Ray in its environment. No proxy is before the gateway: it has servers of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto.inference_pb2 import GenerateChunk, GenerateRequest, GenerateResponse
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.runtime import Runtime
from gateway.apps import GATEWAY_APP, gateway_app
from gateway.site.ray_head import free_ports
from ops.bench.scripted_site import SECRET, SITE

FORWARDER = "forwarder"
SERVICER = "gateway.api.proto.inference_pb2_grpc.add_InferenceServicer_to_server"


@serve.deployment(name=FORWARDER, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
class Forwarder:
    """Nothing but the way to the engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._inference: InferenceStub | None = None

    def _stub(self) -> InferenceStub:
        if self._inference is None:  # in the loop that uses it
            self._inference = InferenceStub(grpc.aio.insecure_channel(self._engine, options=CLIENT_OPTIONS))
        return self._inference

    async def Generate(self, request: GenerateRequest) -> GenerateResponse:
        return await self._stub().Generate(request)

    async def GenerateStream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        call = self._stub().GenerateStream(request)
        try:
            async for chunk in call:
                yield chunk
        finally:
            call.cancel()


def main(directory: Path, redis_url: str, engine: str, grpc_port: int) -> None:
    with tempfile.TemporaryDirectory(prefix="yr-", dir="/tmp") as session:
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=session,
        )
        try:
            [http_port] = free_ports(1)
            serve.start(
                http_options=HTTPOptions(host="127.0.0.1", port=http_port),
                grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
            )
            runtime = Runtime(SITE, redis_url, SECRET, str(directory / "cache"), str(directory / "run"), "127.0.0.1", 0, 0)
            serve.run(gateway_app(runtime, 1), name=GATEWAY_APP, route_prefix=None)
            serve.run(Forwarder.bind(engine), name=FORWARDER, route_prefix="/")
            print("ready", flush=True)
            sys.stdin.read()
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
