"""The site's Serve applications on a Ray cluster: deployed, watched and taken down. The only module here that imports Ray."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from gateway.api.config import PoolSpec
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.api.runtime import Runtime

if TYPE_CHECKING:
    from ray.serve import Application

NAMESPACE = "modelyard"
_LOG_LEVEL = "WARNING"
# Detached, so that they outlive a driver; see workers/driver.
_RANK_PREFIX = "modelyard-rank-"
_POOL_PREFIX = "modelyard-pool-"


def load(environment: Mapping[str, str]) -> None:
    """Imports Ray, which takes seconds; its settings must be in the environment before. Meant for a thread beside other work."""
    os.environ.update({name: value for name, value in environment.items() if name.startswith("RAY_")})
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray.serve  # noqa: F401

    import gateway.apps  # noqa: F401


def connect(address: str) -> None:
    """YardError(UNAVAILABLE) when no Ray answers there."""
    import ray

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise unavailable(f"no Ray at {address}: {error}; start it, or leave --ray-address out") from error


def disconnect() -> None:
    import ray

    ray.shutdown()


def node_addresses() -> set[str]:
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def deploy(runtime: Runtime, gateways: int) -> None:
    """Hands the two applications to Serve and returns while their replicas start. Pools are the controller's to deploy."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level=_LOG_LEVEL, enable_access_log=False))
    deploy_gateways(runtime, gateways)
    deploy_controller(runtime)


def deploy_gateways(runtime: Runtime, gateways: int) -> None:
    """Over running ones: new ones come up beside them first."""
    import ray

    from gateway import apps

    nodes = sum(node["Alive"] for node in ray.nodes())
    _run(apps.GATEWAY_APP, apps.gateway_app(runtime, gateways, nodes))


def deploy_controller(runtime: Runtime) -> None:
    from gateway import apps

    _run(apps.CONTROLLER_APP, apps.controller_app(runtime))


def deploy_pool(runtime: Runtime, pool: str, spec: PoolSpec) -> None:
    """Replaces the driver of a running pool; its ranks stay."""
    from gateway.controller import pool_applications

    pool_applications.deploy(runtime, pool, spec)


def gateway_count() -> int:
    """How many gateways Serve was told to keep. There may be more: they start and stop, also when an upgrade was interrupted."""
    from ray.serve.context import _get_global_client

    from gateway import apps

    client = _get_global_client()
    assert client is not None
    [deployment] = client.get_serve_details()["applications"][apps.GATEWAY_APP]["deployments"].values()
    return deployment["target_num_replicas"]


def _run(name: str, application: Application) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    logging_config = LoggingConfig(log_level=_LOG_LEVEL, enable_access_log=False)
    target = serve.RunTarget(application, name=name, route_prefix=None, logging_config=logging_config)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def check() -> None:
    """YardError with the cause when Serve gave up on an application."""
    from ray import serve

    for name, application in serve.status().applications.items():
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [application.message, *(item.message for item in application.deployments.values())]
            raise YardError(ErrorCode.INTERNAL, f"application {name} does not start: {_last_error(messages)}")


def starting() -> str:
    """What Serve says of the applications that are not running yet."""
    from ray import serve

    waiting = [name for name, application in serve.status().applications.items() if application.status != "RUNNING"]
    return f"starting {', '.join(waiting)}" if waiting else "running"


def undeploy(*, whole_serve: bool) -> None:
    """Gateways first, so that their requests can finish while the pools still compute; then the pools and their ranks.

    `whole_serve`: the Ray is the site's own, so Serve goes too; otherwise it goes when nobody else has an application there.
    """
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from gateway import apps

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        present = list(serve.status().applications)
        first = [name for name in (apps.GATEWAY_APP, apps.CONTROLLER_APP) if name in present]
        if first:
            client.delete_apps(first, blocking=True)
        if whole_serve:
            serve.shutdown()
            return
        if pools := [name for name in present if name.startswith(apps.pool_app_name(""))]:
            client.delete_apps(pools, blocking=True)
        if not serve.status().applications:
            serve.shutdown()
    for actor in cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True)):
        if actor["name"].startswith(_RANK_PREFIX):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(_POOL_PREFIX) and group["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


def _last_error(messages: list[str]) -> str:
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or ["Serve gave no reason"])[-1][:400]
