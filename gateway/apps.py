"""The Serve applications: which class runs in which deployment, and the settings of its replicas.

The one place where `gateway` imports `workers`. The classes know nothing of Ray; each import happens in the replica that
needs it, so that a gateway never pays for torch and the command line for neither.
"""

from __future__ import annotations

from typing import Protocol

from ray import serve
from ray.serve import Application

from gateway.api.config import PoolSpec
from gateway.api.runtime import Runtime
from gateway.controller.pool_digest import deployment_name

GATEWAY_APP = "gateway"
CONTROLLER_APP = "controller"

_REPLICA = {
    # Nothing is called through Serve; the requests come over the replica's own gRPC and HTTP servers.
    "max_ongoing_requests": 10_000,
    "graceful_shutdown_timeout_s": 30.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "health_check_period_s": 2.0,
    # A replica on a loaded 2-core machine may be late without being ill.
    "health_check_timeout_s": 10.0,
    # Accounting only. The ranks of a pool take the CPUs and GPUs, through its placement group.
    "ray_actor_options": {"num_cpus": 0},
}

# A gateway runs in the replica's first loop. In one of its own, which Serve would give it, each event of gRPC would come
# over that first loop and its thread: a third more CPU for each streamed token (ops/bench/gateway.py).
GATEWAY_ACTOR = {
    **_REPLICA["ray_actor_options"],
    "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}},
}


def pool_app_name(pool: str) -> str:
    return f"pool-{pool}"


class Service(Protocol):
    """What runs in a replica."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def check_health(self) -> None: ...


class _Replica:
    """Starts a service with the replica, reports its health, and lets it finish its streams at the end."""

    _service: Service | None = None

    async def _start(self, service: Service) -> None:
        try:
            await service.start()
        except BaseException:
            await service.stop()
            raise
        self._service = service

    def check_health(self) -> None:
        if self._service is not None:
            self._service.check_health()

    async def __del__(self) -> None:
        # Serve awaits this before it ends the process. Without it, streams on the replica's own server are cut.
        service, self._service = self._service, None
        if service is not None:
            await service.stop()


# At an upgrade the new gateways listen, on the same ports, before the old ones finish their streams.
@serve.deployment(name="gateway", max_surge_percent=100, **{**_REPLICA, "ray_actor_options": GATEWAY_ACTOR})
class GatewayReplica(_Replica):
    async def __init__(self, runtime: Runtime) -> None:
        from gateway.ray_metrics import RayMetrics
        from gateway.servers.gateway import Gateway

        await self._start(Gateway(runtime, export=RayMetrics().run))


@serve.deployment(name="controller", num_replicas=1, **_REPLICA)
class ControllerDeployment(_Replica):
    async def __init__(self, runtime: Runtime) -> None:
        from gateway.controller.replica import ControllerReplica

        await self._start(ControllerReplica(runtime))


@serve.deployment(name="driver", num_replicas=1, **_REPLICA)
class PoolDriver(_Replica):
    async def __init__(self, runtime: Runtime, pool: str, spec_json: str) -> None:
        from workers.driver.replica import PoolDriverReplica

        await self._start(PoolDriverReplica(runtime, pool, spec_json))


def gateway_app(runtime: Runtime, replicas: int, nodes: int = 1) -> Application:
    """`replicas` gateways; those on one node share its ports (SO_REUSEPORT).

    On several nodes they are spread, so that no node's death takes all; then an upgrade replaces one after the other.
    """
    if nodes == 1:
        return GatewayReplica.options(num_replicas=replicas).bind(runtime)
    most = -(-replicas // nodes)
    return GatewayReplica.options(num_replicas=replicas, max_replicas_per_node=most, max_surge_percent=0).bind(runtime)


def controller_app(runtime: Runtime) -> Application:
    return ControllerDeployment.bind(runtime)


def pool_app(runtime: Runtime, pool: str, spec: PoolSpec) -> Application:
    """The driver of one pool. Deploy it as `pool_app_name(pool)` with `route_prefix=None`.

    The deployment's name carries a digest of `spec`, by which the controller sees in Serve what a pool runs with.
    The driver lives on one of the pool's own nodes if there is any, so that another node's death does not take it along.
    """
    options = dict(_REPLICA["ray_actor_options"])
    if spec.node_labels:
        options |= {"label_selector": dict(spec.node_labels), "fallback_strategy": [{"label_selector": {}}]}
    driver = PoolDriver.options(name=deployment_name(spec), ray_actor_options=options)
    return driver.bind(runtime, pool, spec.model_dump_json())
