"""The controller's one loop: look, decide, act, report; again after every change, and every PASS_S (level-triggered).

Nothing of it needs to be remembered over a crash: the placement is stored before it is acted on, applications are seen in
Serve, and drivers are told their whole list again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

from gateway.api.records import HEARTBEAT_S, ControllerRecord, NodeRecord
from gateway.api.tasks import cancelled
from gateway.controller.decision import decide
from gateway.controller.effects import Effects, StaleFence, Unreachable
from gateway.controller.footprints import Footprints, remember, with_measured
from gateway.controller.model_requests import Checkpoints
from gateway.controller.scaling import Scaler
from gateway.controller.sights import Sights
from gateway.controller.situation import (
    Ack,
    Action,
    AppSight,
    Assign,
    Decision,
    DeletePool,
    DeployPool,
    Desired,
    Emit,
    Placed,
    ReleaseDevices,
)
from gateway.state.connection import LOST
from gateway.state.lease import Lease
from gateway.state.view import SiteView
from placement.types import PlacedGroup

log = logging.getLogger(__name__)

PASS_S = 1.0
SETTLE_S = 0.05
APPS_S = 3.0
STUCK_S = 60.0


class ControllerLoop:
    """Acts only while the lease is held (rule 1). `run` ends when it is cancelled."""

    def __init__(
        self,
        view: SiteView,
        lease: Lease,
        effects: Effects,
        checkpoints: Checkpoints,
        *,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._lease = lease
        self._effects = effects
        self._checkpoints = checkpoints
        self._owner = owner
        self._clock = clock
        self._wake = asyncio.Event()
        self._sights = Sights(clock)
        self._scaler = Scaler()
        self._fence = 0
        self._groups: tuple[PlacedGroup, ...] | None = None
        self._footprints: Footprints = ()
        self._unplaced: dict[str, tuple[str, ...]] = {}
        self._refused: frozenset[str] = frozenset()
        self._acks: dict[str, tuple[Ack, float]] = {}
        self._apps: tuple[dict[str, AppSight], frozenset[str]] | None = None
        self._apps_due = 0.0
        self._nodes: tuple[NodeRecord, ...] = ()
        self._serving: asyncio.Task[None] | None = None
        self._message = ""
        self._passed_at = clock()

    def wake(self) -> None:
        self._wake.set()

    def check_health(self) -> None:
        """RuntimeError when the lease is held and no pass has gone through for STUCK_S."""
        if self._fence and not self._view.degraded and self._clock() - self._passed_at > STUCK_S:
            raise RuntimeError(f"no pass of the controller has succeeded for {STUCK_S:.0f} s: {self._message}")

    async def run(self) -> None:
        unsubscribe = self._view.subscribe(self.wake)
        heartbeat = asyncio.create_task(self._keep_lease(), name="controller-lease")
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PASS_S):
                        await self._wake.wait()
                await asyncio.sleep(SETTLE_S)  # Changes come in bursts.
                self._wake.clear()
                if heartbeat.done():
                    heartbeat.result()
                await self._try_pass()
        finally:
            unsubscribe()
            await cancelled([heartbeat, self._serving])
            with contextlib.suppress(*LOST):
                await self._lease.release()

    async def _keep_lease(self) -> None:
        """Renews the lease well before it ends, and reports while it is held."""
        while True:
            try:
                seen = max((record.fence for record in self._view.pools.values()), default=0)
                if await self._lease.hold(seen):
                    await self._report()
            except LOST as error:
                log.warning("the lease could not be renewed: %s", error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _try_pass(self) -> None:
        try:
            await self.once()
        except LOST as error:
            self._message = f"the store cannot be reached: {error}"
        except Unreachable as error:
            self._message = str(error)
            log.warning("%s; the next pass tries again", error)
        except StaleFence as error:
            log.warning("%s; this controller stops acting", error)
            await self._lease.release()
        except Exception as error:
            # A bug must not take the site's only controller down for good: it is reported, and check_health sees it.
            self._message = f"a pass failed: {type(error).__name__}: {error}"
            log.exception("a pass of the controller failed")

    async def once(self) -> None:
        """One pass. Raises what an effect raises; the next pass goes on from what is then seen."""
        fence = self._lease.fence
        if not fence or self._view.degraded or not self._view.revision:
            # A store at revision 0 has never been written, or has just lost everything: no reason to take anything down.
            self._fence = 0
            return
        if fence != self._fence:
            await self._begin(fence)
        await self._learn()
        asked = with_measured(self._checkpoints.asked(self._view.models), self._footprints, self._view.pools.values())
        models = self._scaler.scaled(asked, self._view.pools.values(), self._groups or (), self._clock())
        desired = Desired(models, self._view.desired_pools)
        apps, devices_held = await self._look_at_apps()
        observed, happened = self._sights.look(self._view.pools, apps, devices_held, desired.pools)
        now = self._clock()
        acks = {pool: replace(ack, age_s=now - at) for pool, (ack, at) in self._acks.items()}
        decision = decide(desired, observed, Placed(self._groups, self._refused, acks, fence))
        await self._store(decision)
        for event in (*happened, *decision.events):
            await self._emit(event)
        self._serve([action for action in decision.actions if not isinstance(action, Assign)], desired)
        await self._assign([action for action in decision.actions if isinstance(action, Assign)])
        self._passed_at = self._clock()

    async def _begin(self, fence: int) -> None:
        """The lease is new: what is known is what is stored and seen."""
        log.info("controller %s acts with fencing token %d", self._owner, fence)
        self._groups = await self._effects.placement()
        self._footprints = await self._effects.footprints()
        self._refused = frozenset(self._view.controller.unplaced) if self._view.controller else frozenset()
        self._acks, self._apps, self._sights, self._scaler = {}, None, Sights(self._clock), Scaler()
        self._fence = fence

    async def _learn(self) -> None:
        """What loads took is stored before anything is placed by it."""
        footprints = remember(self._footprints, self._view.pools.values())
        if footprints != self._footprints:
            if not await self._effects.save_footprints(footprints):
                raise StaleFence("the lease went to another while footprints were being stored")
            self._footprints = footprints

    async def _look_at_apps(self) -> tuple[dict[str, AppSight], frozenset[str]]:
        now = self._clock()
        if self._apps is None or now >= self._apps_due:
            self._apps, self._nodes = await self._effects.apps(), await self._effects.nodes()
            self._apps_due = now + APPS_S
        return self._apps

    async def _store(self, decision: Decision) -> None:
        if decision.groups != self._groups:
            if not await self._effects.save_placement(decision.groups):
                raise StaleFence("the lease went to another while a placement was being stored")
            self._groups = decision.groups
        changed = decision.unplaced != self._unplaced or decision.message != self._message
        self._unplaced, self._refused, self._message = decision.unplaced, decision.refused, decision.message
        if changed:
            await self._report()

    async def _report(self) -> None:
        await self._effects.report(
            ControllerRecord(
                owner=self._owner,
                fence=self._lease.fence,
                pid=os.getpid(),
                heartbeat_unix=time.time(),
                unplaced=self._unplaced,
                message=self._message,
                nodes=self._nodes,
            )
        )

    async def _emit(self, event: Emit) -> None:
        await self._effects.event(event.kind, event.subject, event.message)

    async def _assign(self, actions: list[Assign]) -> None:
        """All pools at once; one that does not answer keeps none of the others waiting for its list."""
        revision = self._view.revision
        tasks = [self._effects.assign(action.endpoint, self._fence, revision, action.assignments) for action in actions]
        results = await asyncio.gather(*map(self._while_leased, tasks), return_exceptions=True)
        failed: BaseException | None = None
        for action, result in zip(actions, results, strict=True):
            if result is None:
                ack = Ack(action.incarnation, self._fence, action.assignments)
                self._acks[action.pool] = (ack, self._clock())
            elif failed is None or isinstance(result, StaleFence):
                failed = result
        if failed is not None:
            raise failed

    def _serve(self, actions: list[Action], desired: Desired) -> None:
        """Serve calls take seconds: one after the other beside the passes, and none decided on what is old by then."""
        if self._serving is not None and self._serving.done():
            task, self._serving = self._serving, None
            self._apps = None
            task.result()
        elif self._serving is None and actions:
            self._serving = asyncio.create_task(self._serve_all(actions, desired), name="controller-serve")
            self._serving.add_done_callback(lambda _: self.wake())

    async def _serve_all(self, actions: list[Action], desired: Desired) -> None:
        for action in actions:
            match action:
                case DeployPool(pool):
                    await self._while_leased(self._effects.deploy_pool(pool, desired.pools[pool].spec))
                    await self._emit(Emit("pool.deployed", f"Pool/{pool}", "its application was given to Serve"))
                case DeletePool(pool):
                    await self._while_leased(self._effects.delete_pool(pool))
                    await self._emit(Emit("pool.deleted", f"Pool/{pool}", "its application was deleted"))
                case ReleaseDevices(pool):
                    await self._while_leased(self._effects.release_devices(pool))

    async def _while_leased(self, call: Coroutine[None, None, None]) -> None:
        if not self._lease.fence:
            call.close()
            raise StaleFence("the lease has ended")
        await call
