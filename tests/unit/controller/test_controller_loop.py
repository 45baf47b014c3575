"""The controller's passes over a small world, driven pass by pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from fleet import Crash, KnownCheckpoints, World, model_spec, pool_spec
from valkey_server import ValkeyServer

from gateway.api.records import FootprintRecord
from gateway.api.tasks import cancelled
from gateway.controller.effects import StaleFence, Unreachable
from gateway.controller.loop import STUCK_S, ControllerLoop
from gateway.controller.situation import DRAIN_S, LOST_S
from gateway.state.footprint_record import load_footprints, save_footprints
from gateway.state.lease import Lease
from gateway.state.store import SiteStore
from placement.types import PlacedGroup


class Controllers:
    """One controller after the other over one world: a crash ends one, and the next begins with nothing but what is stored."""

    def __init__(self, world: World, store: SiteStore) -> None:
        self.world = world
        self.checkpoints = KnownCheckpoints()
        self._store = store
        self._number = 0
        self.loop = self._new()
        self.crashes = 0

    def _new(self) -> ControllerLoop:
        self._number += 1
        self.lease = Lease(self._store, f"controller-{self._number}")
        return ControllerLoop(
            self.world.view,
            self.lease,
            self.world,
            self.checkpoints,  # type: ignore[arg-type]
            owner=f"controller-{self._number}",
            clock=lambda: self.world.now,
        )

    async def passes(self, count: int = 4) -> None:
        """So many passes and all Serve calls that they begin."""
        for _ in range(count):
            await self.lease.hold()
            try:
                await self.loop.once()
                if self.loop._serving is not None:
                    await self.loop._serving
            except Crash:
                await self.restart()
            self.world.now += 1.0

    async def restart(self) -> None:
        self.crashes += 1
        await self.lease.release()
        self.loop = self._new()

    async def settle(self) -> None:
        """Passes, with all loads finishing in between, until nothing changes any more."""
        before: object = None
        while before != (self.world.stored, dict(self.world.running)):
            before = (self.world.stored, dict(self.world.running))
            await self.passes()
            self.world.finish_loads()


@pytest.fixture
async def store(valkey: ValkeyServer, site: str) -> AsyncIterator[SiteStore]:
    opened = SiteStore(valkey.url, site)
    yield opened
    await opened.close()


@pytest.fixture
def controllers(store: SiteStore) -> Controllers:
    return Controllers(World(), store)


async def test_a_site_comes_up_and_each_thing_is_done_once(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    await controllers.settle()
    assert world.groups("p") == {"m": "ready"}
    assert world.effects.count("deploy p") == 1
    assert world.loads == [("p", "m")]
    assert [event[0] for event in world.events] == ["pool.deployed", "pool.up", "model.placed"]


async def test_adding_a_model_never_restarts_another(controllers: Controllers) -> None:
    """Also one that would pack better, and one of higher priority that finds no room."""
    world = controllers.world
    world.want("Pool", "p", pool_spec(devices=2))
    world.want("Model", "m", model_spec())
    await controllers.settle()
    world.want("Model", "a", model_spec(priority=5))
    await controllers.settle()
    world.want("Model", "b", model_spec(priority=100))
    await controllers.settle()
    assert world.loads == [("p", "m"), ("p", "a")]
    assert world.record is not None
    assert "needs" in world.record.unplaced["b"][0]


async def test_an_unplaced_model_is_said_once_and_placed_when_there_is_room(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    world.want("Model", "n", model_spec())
    await controllers.settle()
    said = [event for event in world.events if event[:2] == ("model.unplaced", "Model/n")]
    assert len(said) == 1
    world.want("Model", "m", None)
    await controllers.settle()
    assert world.groups("p") == {"n": "ready"}
    assert world.record is not None
    assert not world.record.unplaced
    assert ("model.removed", "Model/m") in {event[:2] for event in world.events}


async def test_a_lost_node_moves_its_models_after_a_while_and_no_others(controllers: Controllers) -> None:
    world = controllers.world
    for name in ("p", "q"):
        world.want("Pool", name, pool_spec(memory="3GiB"))
    world.want("Model", "m", model_spec(pools=("p", "q")))
    world.want("Model", "n", model_spec(pools=("q",)))
    await controllers.settle()
    home = next(pool for pool in ("p", "q") if "m" in world.groups(pool))
    assert home == "p"
    world.lose_node("p")
    await controllers.passes()
    assert world.loads.count(("q", "m")) == 0, "its driver may be back in a moment, with the weights still there"
    world.now += LOST_S
    await controllers.settle()
    assert world.groups("q") == {"n": "ready", "m": "ready"}
    assert world.loads.count(("q", "n")) == 1
    assert "pool.lost" in {event[0] for event in world.events}


async def test_a_driver_that_comes_back_is_told_its_list_and_nothing_moves(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    await controllers.settle()
    spec, record = world.running.pop("p")
    world.show()
    await controllers.passes()
    stored = world.stored
    world.running["p"] = (spec, msgspec.structs.replace(record, incarnation="second"))
    world.show()
    world.effects.clear()
    await controllers.settle()
    assert "assign p" in world.effects
    assert world.stored == stored
    assert world.loads == [("p", "m")]


async def test_a_model_that_must_move_serves_until_its_new_group_does(controllers: Controllers) -> None:
    world = controllers.world
    for name in ("p", "q"):
        world.want("Pool", name, pool_spec())
    world.want("Model", "m", model_spec(pools=("p",)))
    await controllers.settle()
    world.want("Model", "m", model_spec(pools=("q",)))
    await controllers.passes()
    assert "m" in world.groups("p"), "the old place goes on"
    assert world.groups("q") == {"m": "loading"}
    world.finish_loads()
    await controllers.settle()
    assert world.groups("p") == {}
    assert world.groups("q") == {"m": "ready"}


async def test_a_deleted_pool_drains_first_and_its_models_go_elsewhere(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    await controllers.settle()
    world.want("Pool", "q", pool_spec())
    world.want("Pool", "p", None)
    await controllers.passes()
    assert world.groups("p")["m"] == "ready", "nothing else serves it yet"
    await controllers.settle()
    assert set(world.running) == {"q"}
    assert world.groups("q") == {"m": "ready"}
    assert world.held == {"q"}


async def test_a_pool_that_does_not_drain_is_deleted_all_the_same(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    await controllers.settle()
    world.want("Pool", "p", None)
    world.unreachable.add("p")
    for _ in range(3):
        with pytest.raises(Unreachable):
            await controllers.passes(1)
    assert "p" in world.sightings
    world.now += DRAIN_S
    with pytest.raises(Unreachable):
        await controllers.passes(1)
    await controllers.passes(2)
    assert "p" not in world.sightings


async def test_a_changed_pool_is_deleted_and_run_again(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Pool", "q", pool_spec())
    world.want("Model", "m", model_spec(pools=("p",)))
    await controllers.settle()
    world.effects.clear()
    world.want("Pool", "p", pool_spec(memory="3GiB"))
    await controllers.settle()
    assert [effect for effect in world.effects if effect.startswith(("deploy", "delete"))] == ["delete p", "deploy p"]
    assert world.running["p"][1].ranks[0].capacity_bytes == 3 * 2**30
    assert world.groups("p") == {"m": "ready"}


async def test_what_a_pool_left_behind_is_given_back(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "q", pool_spec())
    world.held.add("p")
    await controllers.settle()
    assert world.held == {"q"}


async def test_a_pool_that_cannot_start_says_why(controllers: Controllers) -> None:
    world = controllers.world
    world.stuck.add("p")
    world.want("Pool", "p", pool_spec(devices=3))
    world.want("Model", "m", model_spec())
    await controllers.passes()
    assert world.record is not None
    assert world.record.unplaced["m"] == ("pool `p` is starting",)
    world.now += 100
    await controllers.passes()
    assert "did not come up" in world.record.message
    assert "room for 3 × cpu" in world.record.message
    assert world.record.message in world.record.unplaced["m"]


async def test_a_model_whose_checkpoint_cannot_be_read_says_so_and_one_that_serves_goes_on(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec(devices=2))
    world.want("Model", "m", model_spec())
    await controllers.settle()
    controllers.checkpoints.unreadable |= {"m", "n"}
    world.want("Model", "n", model_spec())
    await controllers.settle()
    assert world.groups("p") == {"m": "ready"}
    assert world.record is not None
    assert world.record.unplaced["n"] == ("cannot be read",)
    await controllers.restart()
    await controllers.settle()
    assert world.loads == [("p", "m")]


async def test_without_a_stored_placement_what_pools_hold_is_taken_over(controllers: Controllers) -> None:
    """The store was flushed and the controller is new: nothing moves."""
    world = controllers.world
    for name in ("p", "q"):
        world.want("Pool", name, pool_spec())
    world.want("Model", "m", model_spec(pools=("q",)))
    await controllers.settle()
    placed = world.stored
    world.want("Model", "m", model_spec(pools=("p", "q")))
    world.stored = None
    await controllers.restart()
    await controllers.settle()
    assert world.stored == placed
    assert not [load for load in world.loads if load[0] == "p"]


async def test_one_pool_that_does_not_answer_keeps_no_other_waiting(controllers: Controllers) -> None:
    world = controllers.world
    for name in ("p", "q"):
        world.want("Pool", name, pool_spec())
        world.want("Model", f"on-{name}", model_spec(pools=(name,)))
    world.unreachable.add("p")
    for _ in range(3):
        try:
            await controllers.passes(1)
        except Unreachable:
            continue
    assert world.groups("q") == {"on-q": "loading"}
    world.unreachable.clear()
    await controllers.settle()
    assert world.groups("p") == {"on-p": "ready"}


@pytest.mark.parametrize("crash_after", range(1, 26))
async def test_a_crash_after_any_effect_is_repaired_by_the_next_pass(controllers: Controllers, crash_after: int) -> None:
    """The site ends as it does without a crash, and no model is loaded twice."""
    world = controllers.world
    world.crash_after = crash_after
    world.want("Pool", "p", pool_spec())
    world.want("Pool", "q", pool_spec())
    world.want("Model", "m", model_spec(pools=("p",)))
    world.want("Model", "n", model_spec(pools=("q",)))
    await controllers.settle()
    world.want("Model", "m", model_spec(pools=("p",), replicas=0))
    world.want("Model", "o", model_spec(pools=("p",)))
    await controllers.settle()
    assert controllers.crashes == (crash_after <= len(world.effects))
    assert {pool: world.groups(pool) for pool in world.running} == {"p": {"o": "ready"}, "q": {"n": "ready"}}
    assert sorted(world.loads) == [("p", "m"), ("p", "o"), ("q", "n")]
    assert world.effects.count("deploy p") == world.effects.count("deploy q") == 1


async def test_rule_1_without_the_lease_nothing_is_done(controllers: Controllers) -> None:
    """Rule 1: one writer. A controller that lost its lease stops before the next effect."""
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    await controllers.lease.hold()
    await controllers.lease.release()
    await controllers.loop.once()
    assert not world.effects
    await controllers.lease.hold()
    world.want("Model", "m", model_spec())
    world.lease_lost = True
    with pytest.raises(StaleFence):
        await controllers.loop.once()
    assert not [effect for effect in world.effects if effect.startswith("assign")]


async def test_rule_1_a_lease_that_ends_within_a_pass_ends_its_effects(controllers: Controllers) -> None:
    """Rule 1: it is looked at before each effect, not once a pass."""
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    await controllers.settle()
    save = world.save_placement

    async def save_and_lose(groups: tuple[PlacedGroup, ...]) -> bool:
        saved = await save(groups)
        await controllers.lease.release()
        return saved

    world.save_placement = save_and_lose  # type: ignore[method-assign]
    world.want("Model", "m", model_spec())
    world.effects.clear()
    await controllers.lease.hold()
    with pytest.raises(StaleFence):
        await controllers.loop.once()
    assert "save" in world.effects
    assert "assign p" not in world.effects


async def test_a_bug_in_a_pass_is_reported_and_ends_in_bad_health(controllers: Controllers) -> None:
    world, loop = controllers.world, controllers.loop
    world.want("Pool", "p", pool_spec())
    await controllers.settle()
    loop.check_health()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    controllers.checkpoints.asked = broken  # type: ignore[assignment, method-assign]
    await controllers.lease.hold()
    await loop._try_pass()
    world.now += STUCK_S + 1
    with pytest.raises(RuntimeError, match="a pass failed"):
        loop.check_health()


async def test_rule_1_of_two_running_controllers_one_acts_and_the_other_takes_over(valkey: ValkeyServer, site: str) -> None:
    """Rule 1, with both loops running: when the first stops, the second goes on within moments, with a higher token."""
    world = World()
    world.want("Pool", "p", pool_spec())
    stores = [SiteStore(valkey.url, site) for _ in range(2)]
    leases = [Lease(store, f"controller-{number}") for number, store in enumerate(stores)]
    loops = [
        ControllerLoop(world.view, lease, world, KnownCheckpoints(), owner=f"controller-{number}")  # type: ignore[arg-type]
        for number, lease in enumerate(leases)
    ]
    tasks = [asyncio.create_task(loop.run()) for loop in loops]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                world.show()
                await asyncio.sleep(0.02)

    await until(lambda: "assign p" in world.effects)
    first = next(number for number, lease in enumerate(leases) if lease.fence)
    token = leases[first].fence
    assert not leases[1 - first].fence
    assert world.effects.count("deploy p") == 1
    await cancelled([tasks[first]])
    world.want("Model", "m", model_spec())
    await until(lambda: world.loads == [("p", "m")])
    assert leases[1 - first].fence == token + 1
    assert world.record is not None
    assert world.record.owner == f"controller-{1 - first}"
    await cancelled(tasks)
    assert await stores[0].redis.get(stores[0].keys.lease) is None, "a controller that stops gives its lease back"
    for store in stores:
        await store.close()


async def test_an_empty_store_is_no_reason_to_take_anything_down(controllers: Controllers) -> None:
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    await controllers.settle()
    world.effects.clear()
    fresh = World(sightings=world.sightings, held=world.held, running=world.running)
    fresh.show()
    others = Controllers(fresh, controllers._store)
    await controllers.lease.release()
    await others.passes()
    assert not [effect for effect in fresh.effects if effect != "report"]


async def test_what_loads_took_outlives_controllers_and_drivers(controllers: Controllers, store: SiteStore) -> None:
    """In the store, and written by the controller that holds the lease alone."""
    world = controllers.world
    world.want("Pool", "p", pool_spec())
    world.want("Model", "m", model_spec())
    await controllers.settle()
    seen = FootprintRecord("d", "torch", "2", "auto", "cpu", "", 1, 1, 512, 1, 256, (2**28,), (2**20,), (64,))
    spec, record = world.running["p"]
    world.running["p"] = (spec, msgspec.structs.replace(record, footprints=(seen,)))
    world.show()
    await controllers.passes(2)
    assert world.learned == (seen,)
    assert world.effects.count("learn") == 1
    world.running["p"] = (spec, record)  # a driver that holds nothing any more
    world.show()
    await controllers.restart()
    await controllers.passes(2)
    assert world.learned == (seen,)
    assert await controllers.lease.hold()
    assert await save_footprints(store, controllers.lease, (seen,))
    await controllers.lease.release()
    assert not await save_footprints(store, controllers.lease, ())
    assert await load_footprints(store) == (seen,)
    await store.redis.set(store.keys.footprints, b'[{"of": "another version"}]')
    assert await load_footprints(store) == ()
