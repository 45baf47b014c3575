"""What a driver says of its switches, its memory and its work, after the events that make them."""

from __future__ import annotations

from pool_world import LOAD_MIB, MIB, World, wanted

from gateway.api.buckets import SWITCH_BOUNDS_S
from workers.driver.estimates import CHECK_ESTIMATE_S
from workers.driver.observe import group_records, model_totals, rank_records, switch_records
from workers.messages import DeviceLoad, Welcome
from workers.rank.device_load import HostLoad


def ready() -> World:
    world = World()
    world.assign(wanted("m"))
    world.run()
    assert world.states("m") == ["ready"], world.events
    return world


def test_switches_say_how_long_how_much_and_how_near_the_link() -> None:
    world = ready()
    world.core.state.link_bytes_per_s = 1000.0 * MIB
    world.core.on_set_residency(world.now, 0, "m", "parked")
    world.run()
    world.core.on_set_residency(world.now, 0, "m", "resident")
    world.run()
    switches = {switch.path: switch for switch in switch_records(world.core.state)}
    assert set(switches) >= {"load", "park", "wake"}
    for switch in switches.values():
        assert sum(switch.buckets) == switch.count
        assert len(switch.buckets) == len(SWITCH_BOUNDS_S) + 1
    weights = sum(shard.bytes["weights"] for group in world.core.state.groups.values() for shard in group.held.values())
    wake = switches["wake"]
    assert wake.bytes == weights
    assert wake.last_s == 0 or abs(wake.link_share - weights / wake.last_s / (1000 * MIB)) < 0.001


def test_tokens_are_counted_by_model() -> None:
    world = ready()
    assert model_totals(world.core.state) == (), "the canary is nobody's request"
    world.submit((1, 2, 3), max_tokens=4)
    world.run()
    [totals] = model_totals(world.core.state)
    assert (totals.model, totals.prompt_tokens, totals.completion_tokens, totals.failed) == ("m", 3, 4, 0)


def test_kv_in_use_and_what_lies_between() -> None:
    world = ready()
    [group] = world.core.state.groups.values()
    assert group.batcher is not None
    assert group.sizing is not None
    block = sum(group.sizing.block_bytes.values())
    taken = group.batcher.blocks.allocate(4)
    assert taken is not None
    group.batcher.blocks.release(taken[:3])
    [record] = group_records(world.core.state, world.now, 0.0)
    assert (record.kv_used_bytes, record.kv_hole_bytes) == (block, max(taken) * block)
    assert record.kv_bytes == group.kv_blocks * block


def test_devices_say_what_they_do() -> None:
    world = ready()
    load = HostLoad()()
    assert 0 <= load.utilization <= 1
    assert 0 < load.used_bytes < load.total_bytes
    assert load.link_bytes_per_s > 2**27
    known, *others = rank_records(world.core.state, {}, {0: DeviceLoad(0.25, 5, 9, 3.0)})
    assert (known.utilization, known.used_bytes, known.total_bytes, known.link_bytes_per_s) == (0.25, 5, 9, 3.0)
    assert all(rank.utilization == -1 for rank in others)


def test_a_group_on_its_way_says_how_long_it_will_take() -> None:
    """Not one that waits for room or for a request, nor anything while ranks are down: nobody knows when these come."""
    world = World(capacity_mib=LOAD_MIB)
    world.core.state.load_times_s["m"] = 8.0

    def ready_in_s() -> dict[str, float]:
        return {record.model: record.ready_in_s for record in group_records(world.core.state, world.now, 0.0)}

    world.assign(wanted("m"))
    while world.states("m") != ["loading"]:
        world.turn(loads=False)
    assert ready_in_s() == {"m": 8.0 + CHECK_ESTIMATE_S}
    world.now += 3.0
    assert ready_in_s() == {"m": 5.0 + CHECK_ESTIMATE_S}
    world.run()
    assert ready_in_s() == {"m": -1.0}, "it serves"
    world.core.on_set_residency(world.now, 0, "m", "parked")
    world.run()
    assert (world.states("m"), ready_in_s()) == (["parked"], {"m": -1.0}), "nobody has asked for it"
    world.submit()
    while world.states("m") != ["waking"]:
        world.core.on_tick(world.now)
    assert ready_in_s()["m"] >= 0
    world.lose_ranks()
    assert ready_in_s() == {"m": -1.0}


def test_a_rank_that_is_away_stays_where_it_was_and_one_that_never_ran_is_starting() -> None:
    world = ready()
    seen = {0: Welcome(0, 7, "cpu", "here", ())}
    [never] = rank_records(world.core.state, {})
    assert (never.word, never.node) == ("starting", "")
    [away] = rank_records(world.core.state, {}, None, seen)
    assert (away.word, away.node, away.pid) == ("restarting", "here", 0)
    [back] = rank_records(world.core.state, seen, None, seen)
    assert (back.word, back.pid) == ("alive", 7)
