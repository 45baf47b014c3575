"""`yard upgrade`: the running site goes over to the installed version, one kind of process after the other, while it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from gateway.api.config import Manifest, PoolSpec
from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.api.records import SiteStatus
from gateway.site import down, ray_head, ray_health, ray_watch, state
from gateway.site.board import Board
from gateway.site.client import SiteClient
from gateway.site.home import Home
from gateway.site.site_files import SiteFiles
from gateway.site.summary import summarize
from gateway.site.up import runtime_of

_POLL_S = 0.25
Processes = Callable[[SiteStatus], frozenset[str]]
"""The ids of one kind of process in a status."""


def upgrade(home: Home, site: SiteFiles, board: Board, wait_s: float) -> state.SiteState:
    """Controller, gateways, pool drivers; each kind serves again before the next begins. YardError when one does not come.

    Gateways are replaced by ones that listen already, and finish their streams. A driver finishes what runs; the next one
    adopts its ranks, so that no weight is loaded, unless the new version speaks another protocol to them.
    """
    found = state.load(home)
    if found is None or not down.is_complete(found):
        raise unavailable("no site runs in this home; `yard up` starts one with the installed version")

    def refuse_ended_ray() -> None:
        ray_health.refuse_ended(home, found, "upgrade", "; `yard up` ends what is left and starts the site anew")

    try:
        with ray_watch.watched(home, board, refuse_ended_ray):
            _upgrade(home, site, found, board, wait_s, refuse_ended_ray)
    except Exception:
        refuse_ended_ray()  # what fails for want of Ray's processes says all but that
        raise
    return found


def _upgrade(
    home: Home, site: SiteFiles, found: state.SiteState, board: Board, wait_s: float, refuse_ended_ray: Callable[[], None]
) -> None:
    from gateway.site import deployment

    deployment.load(ray_head.environment(home, loopback=site.is_loopback) if found.ray_is_ours else {})
    deployment.connect(found.ray_address)
    try:
        runtime = runtime_of(home, found, site)
        with SiteClient(found.grpc_address, home.secrets().site, tls=found.tls) as client:
            change = _Change(client, board, wait_s, refuse_ended_ray)
            change.make("controller", lambda: deployment.deploy_controller(runtime), _controllers)
            wanted = deployment.gateway_count()
            change.make("gateways", lambda: deployment.deploy_gateways(runtime, wanted), gateways_of, wanted)
            for pool, spec in _pools(client).items():
                change.make(
                    f"pool {pool}", lambda pool=pool, spec=spec: deployment.deploy_pool(runtime, pool, spec), _driver_of(pool)
                )
    finally:
        deployment.disconnect()


class _Change:
    def __init__(self, client: SiteClient, board: Board, wait_s: float, refuse_ended_ray: Callable[[], None]) -> None:
        self._client, self._board, self._wait_s, self._refuse_ended_ray = client, board, wait_s, refuse_ended_ray

    def make(self, name: str, deploy: Callable[[], None], processes: Processes, wanted: int = 1) -> None:
        """`wanted`: how many of these processes there are to be."""
        before = self._client.status()
        with self._board.step(name, "replacing") as step:
            deploy()
            began_s = looked_s = time.monotonic()
            while not self._is_replaced(before, processes, wanted):
                if time.monotonic() - looked_s > ray_health.LOOK_S:
                    self._refuse_ended_ray()
                    looked_s = time.monotonic()
                if time.monotonic() - began_s > self._wait_s:
                    raise YardError(
                        ErrorCode.DEADLINE,
                        f"{name}: not replaced after {self._wait_s:.0f} s; what serves, serves on; see `yard status`",
                    )
                time.sleep(_POLL_S)
            step.note = f"{len(processes(before))} replaced"

    def _is_replaced(self, before: SiteStatus, processes: Processes, wanted: int) -> bool:
        try:
            return is_replaced(before, self._client.status(), processes, wanted)
        except YardError as error:
            if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE):
                return False
            raise


def is_replaced(before: SiteStatus, now: SiteStatus, processes: Processes, wanted: int) -> bool:
    """None of the processes from before is there, as many as are wanted are (before there may have been more, of an upgrade that
    was interrupted, or fewer), and the site is as ready as it was."""
    old, new = processes(before), processes(now)
    if new & old or len(new) < min(len(old), wanted):
        return False
    return summarize(now).is_ready or not summarize(before).is_ready


def _controllers(status: SiteStatus) -> frozenset[str]:
    return frozenset([status.controller.owner] if status.controller else [])


def gateways_of(status: SiteStatus) -> frozenset[str]:
    return frozenset(gateway.gateway for gateway in status.gateways)


def _driver_of(pool: str) -> Callable[[SiteStatus], frozenset[str]]:
    return lambda status: frozenset(record.incarnation for record in status.pools if record.pool == pool)


def _pools(client: SiteClient) -> dict[str, PoolSpec]:
    specs = {item.name: Manifest.model_validate(json.loads(item.manifest_json)).spec for item in client.get("Pool").objects}
    return {name: spec for name, spec in specs.items() if isinstance(spec, PoolSpec)}
