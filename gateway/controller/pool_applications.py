"""The Serve applications of pools. The only module of the controller that imports Ray; its functions block."""

from __future__ import annotations

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from gateway.api.config import PoolSpec
from gateway.api.records import NodeRecord
from gateway.api.runtime import POOL_MEMORY_RESOURCE, Runtime
from gateway.controller.pool_digest import is_deployment_name
from gateway.controller.situation import AppSight

SERVE_ERRORS = (RayError, RayServeException, TimeoutError, RuntimeError, ValueError)
# The driver holds its devices through a placement group of this name, which outlives it.
_DEVICES_PREFIX = "modelyard-pool-"


def status() -> tuple[dict[str, AppSight], frozenset[str]]:
    """Pool applications by pool name, and the pools whose placement group exists."""
    from gateway.apps import pool_app_name

    prefix = pool_app_name("")
    apps = {}
    for name, app in serve.status().applications.items():
        if name.startswith(prefix):
            deployment = next((item for item in app.deployments if is_deployment_name(item)), "")
            messages = [app.message, *(item.message for item in app.deployments.values())]
            message = " ".join(dict.fromkeys(text for text in messages if text))
            apps[name.removeprefix(prefix)] = AppSight(ApplicationStatus(app.status).value, deployment, message)
    names = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    held = frozenset(name.removeprefix(_DEVICES_PREFIX) for name in names if name.startswith(_DEVICES_PREFIX))
    return apps, held


def nodes() -> tuple[NodeRecord, ...]:
    """What the living nodes declare, by name."""
    found = [
        NodeRecord(
            node=node["NodeManagerAddress"],
            pool_mib=int(node["Resources"].get(POOL_MEMORY_RESOURCE, 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return tuple(sorted(found, key=lambda node: node.node))


def deploy(runtime: Runtime, pool: str, spec: PoolSpec) -> None:
    """Returns when Serve has taken the application over; a pool without room stays DEPLOYING."""
    from gateway.apps import pool_app, pool_app_name

    target = serve.RunTarget(
        pool_app(runtime, pool, spec),
        name=pool_app_name(pool),
        route_prefix=None,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def delete(pool: str) -> None:
    from gateway.apps import pool_app_name

    serve.delete(pool_app_name(pool))
    release_devices(pool)


def release_devices(pool: str) -> None:
    """Removes the pool's placement group; Ray ends the rank actors in it."""
    name = _DEVICES_PREFIX + pool
    if any(group["name"] == name and group["state"] != "REMOVED" for group in placement_group_table().values()):
        remove_placement_group(get_placement_group(name))
