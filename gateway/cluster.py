"""What a Serve configuration file names: `import_path: gateway.cluster:gateway`, on a Ray that somebody else runs (KubeRay).

All of it comes from the environment of the pods, so that secrets stay where the cluster keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from ray.serve import Application

from gateway.api.errors import invalid
from gateway.api.runtime import Runtime, TlsFiles
from gateway.apps import GATEWAY_ACTOR, GatewayReplica, controller_app

GATEWAY_RESOURCE = "modelyard_gateway"
"""Of the Ray nodes to which clients are led; gateways run nowhere else."""


class Replicas(msgspec.Struct, frozen=True):
    replicas: int = 1


def gateway(args: Mapping[str, object]) -> Application:
    """`args`: `replicas`."""
    replicas = msgspec.convert(dict(args), Replicas).replicas
    where = {**GATEWAY_ACTOR, "resources": {GATEWAY_RESOURCE: 0.001}}
    return GatewayReplica.options(num_replicas=replicas, ray_actor_options=where).bind(runtime(os.environ))


def controller(args: Mapping[str, object]) -> Application:
    del args
    return controller_app(runtime(os.environ))


def runtime(environment: Mapping[str, str]) -> Runtime:
    """YardError names what is missing."""
    if missing := [name for name in ("MODELYARD_REDIS", "MODELYARD_SECRET") if not environment.get(name)]:
        raise invalid(f"the environment lacks {' and '.join(missing)}; see ops/kubernetes/README.md")
    tls = None
    if cert := environment.get("MODELYARD_TLS_CERT"):
        tls = TlsFiles(cert, environment["MODELYARD_TLS_KEY"], environment.get("MODELYARD_TLS_CLIENT_CA", ""))
    return Runtime(
        site=environment.get("MODELYARD_SITE", "default"),
        redis_url=environment["MODELYARD_REDIS"],
        secret=environment["MODELYARD_SECRET"],
        cache_dir=environment.get("MODELYARD_CACHE", "/var/cache/modelyard"),
        run_dir=environment.get("MODELYARD_RUN", "/tmp/modelyard"),
        bind_host=environment.get("MODELYARD_HOST", "node"),
        grpc_port=int(environment.get("MODELYARD_GRPC_PORT", "50051")),
        http_port=int(environment.get("MODELYARD_HTTP_PORT", "8000")),
        tls=tls,
        internal_tls=environment.get("MODELYARD_INTERNAL_TLS", "1") != "0",
    )
