"""A cuda pool inside Ray: a bundle and a rank process for each GPU, of which Ray is told here, and which rehearse on CPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import ray

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import KvSpec, LimitsSpec, ModelSpec, PoolSpec
from gateway.api.runtime import Runtime
from workers.driver import ray_ranks
from workers.driver.effects import ModelFacts
from workers.driver.group import Wanted
from workers.driver.ray_ranks import RayRanks
from workers.driver.replica import PoolDriverReplica
from workers.driver.sizing import Placement

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))
from random_checkpoints import save_random

pytestmark = pytest.mark.site

GIB = 2**30


@pytest.fixture(scope="module")
def ray_with_two_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class Reader:
    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        found = open_checkpoint(spec.source, self._cache)
        return ModelFacts(found.shape, found.digest, found.precision, found.max_context, ())

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 2)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return ""


def driver_of(directory: Path, devices: int) -> PoolDriverReplica:
    runtime = Runtime("gpus", "", "secret", str(directory), str(directory), "127.0.0.1")
    spec = PoolSpec(device="cuda", devices=devices, memory=GIB)
    launcher = RayRanks(PoolDriverReplica.rank_config(runtime, "g", spec), spec, module="workers.rank.rehearsal")
    return PoolDriverReplica(runtime, "g", spec.model_dump_json(), launcher=launcher, reader=Reader(directory))


async def until(driver: PoolDriverReplica, condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(90):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(driver.record()) from None


def gpu_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(each.decode().partition("=")[2] for each in variables if each.startswith(b"CUDA_VISIBLE_DEVICES="))


@pytest.mark.usefixtures("ray_with_two_gpus")
@pytest.mark.timeout(300)
async def test_each_bundle_starts_the_rank_of_its_gpu(tmp_path: Path) -> None:
    """Rule 11: a rank that is lost is all lost, and all come back on their bundles."""
    source = save_random("llama", tmp_path / "llama")
    limits = LimitsSpec(concurrency=2, batch_tokens=32)
    spec = ModelSpec(source=str(source), precision="fp32", kv=KvSpec(floor=32 * 2**20), limits=limits)
    driver = driver_of(tmp_path, 2)
    await driver.start()

    def ready() -> bool:
        return [group.state for group in driver.record().groups] == ["ready"]

    try:
        driver.loop.assign(1, 1, [Wanted("tp", 1, spec, spec.model_dump_json(), Placement((0, 1), 2, 1))])
        await until(driver, ready)  # both computed the canary together
        pids = [rank.pid for rank in driver.record().ranks]
        assert sorted(map(gpu_of, pids)) == ["0", "1"]
        os.kill(pids[0], signal.SIGKILL)
        await until(driver, lambda: not set(pids) & {rank.pid for rank in driver.record().ranks} and ready())
        assert sorted(gpu_of(rank.pid) for rank in driver.record().ranks) == ["0", "1"]
    finally:
        await driver.stop(end_ranks=True)


@pytest.mark.usefixtures("ray_with_two_gpus")
async def test_a_site_with_too_few_gpus_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "PLACEMENT_TIMEOUT_S", 1.0)
    driver = driver_of(tmp_path, 3)
    await driver.start()
    try:
        await until(driver, lambda: "asks for 3 GPUs; this site has 2" in driver.record().message)
    finally:
        await driver.stop(end_ranks=True)
