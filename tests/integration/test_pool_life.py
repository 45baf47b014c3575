"""The controller against a real Ray Serve, real pool drivers and a real Valkey: pools come, change and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from valkey_server import ValkeyServer

from gateway.api.runtime import Runtime
from gateway.controller import pool_applications
from gateway.controller.replica import ControllerReplica
from gateway.state.edits import Put
from gateway.state.history import History
from gateway.state.snapshot import Observed
from gateway.state.store import SiteStore

pytestmark = pytest.mark.site

MIB = 2**20


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=3, resources={"modelyard_pool_mib": 4096}, include_dashboard=False, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield
        serve.shutdown()
        ray.shutdown()


def pool(name: str, memory: str) -> Put:
    spec = {"device": "cpu", "devices": 1, "memory": memory}
    return Put({"apiVersion": "modelyard/v1", "kind": "Pool", "metadata": {"name": name}, "spec": spec})


@pytest.mark.usefixtures("own_ray")
@pytest.mark.timeout(300)
async def test_pools_come_change_and_go_and_touch_no_other(own_valkey: ValkeyServer, site: str, tmp_path: Path) -> None:
    runtime = Runtime(site, own_valkey.url, "secret", str(tmp_path), str(tmp_path), "127.0.0.1")
    store, controller = SiteStore(own_valkey.url, site), ControllerReplica(runtime)
    await controller.start()

    async def until(condition: Callable[[Observed], bool]) -> Observed:
        async with asyncio.timeout(90):
            while True:
                controller.check_health()
                observed = await store.observed()
                if condition(observed):
                    return observed
                await asyncio.sleep(0.2)

    def up(name: str, size_bytes: int) -> Callable[[Observed], bool]:
        """The pool runs with ranks of this size and its driver has taken an assignment."""

        def condition(observed: Observed) -> bool:
            record = observed.pools.get(name)
            return bool(record and record.fence and record.ranks and record.ranks[0].capacity_bytes == size_bytes)

        return condition

    try:
        await store.apply([pool("a", "256MiB"), pool("b", "256MiB")], "test")
        await until(up("a", 256 * MIB))
        other = (await until(up("b", 256 * MIB))).pools["b"].incarnation

        await store.apply([pool("a", "512MiB")], "test")
        await until(up("a", 512 * MIB))

        await store.delete("Pool", "a", actor="test")
        observed = await until(lambda observed: "a" not in observed.pools)
        assert observed.pools["b"].incarnation == other, "the other pool was not touched"
        kinds: list[str] = []
        async with asyncio.timeout(60):
            async for item in History(store).read(100, follow=True):
                kinds += [item.kind] if item.subject == "Pool/a" else []
                if kinds.count("pool.deleted") == 2:  # The first time in order to be changed.
                    break
        assert kinds.count("pool.deployed") == 2

        await controller.stop()
        apps, held = await asyncio.to_thread(pool_applications.status)
        assert set(apps) == {"b"}, "a controller that stops takes nothing down"
        assert held == {"b"}
    finally:
        await controller.stop()
        await store.close()
