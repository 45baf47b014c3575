"""The server of one model, in an interpreter of its own over the stand-in: real processes, real MPI."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from trtllm_environment import mpi_variables

from gateway.api.config import EngineSpec
from gateway.api.errors import YardError
from workers.driver.engine_launch import environment as engine_environment
from workers.driver.engine_launch import server_command
from workers.driver.engine_link import EngineLink, connect
from workers.driver.engine_processes import CONFIG, EngineProcesses
from workers.engines.trtllm.messages import Cancel, Generate, GetStats, Load, Park, Progress, Tokens, Wake

SECRET = "pool-secret"
MIB = 2**20


class Served:
    """A server, connected, and what it sent."""

    def __init__(self, directory: Path, settings: EngineSpec, world: int, *, devices: list[int] | None = None) -> None:
        self.processes = EngineProcesses(directory)
        self.settings = settings
        self.world = world
        self.devices = list(range(world)) if devices is None else devices
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, asyncio.Future[Any]] = {}
        self.frames: list[Tokens] = []
        self.progress: list[str] = []
        self.lost: asyncio.Task[str]

    async def start(self) -> None:
        command = server_command(self.settings, Path(CONFIG), [("here", self.world)])
        environment = engine_environment(self.settings, {"PATH": "/usr/bin:/bin", "HOME": "/root"}, self.devices)
        self.processes.start("e1", command, environment, {"secret": SECRET, "grace_s": 5.0})
        self.link = await self.dial()

    async def dial(self) -> EngineLink:
        async with asyncio.timeout(60):
            while True:
                try:
                    link = await connect(f"unix:{self.processes.socket('e1')}", SECRET, "driver")
                    break
                except YardError:
                    assert self.processes.exit_code("e1") is None, self.processes.log_tail("e1")
                    await asyncio.sleep(0.05)
        self.lost = asyncio.create_task(link.read(self._on_message))
        return link

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Progress):
            self.progress.append(message.what)
        if isinstance(message, Tokens):
            self.frames.append(message)
            for output in message.outputs:
                self.tokens[output.sequence] += output.tokens
                if output.finish:
                    self.finished[output.sequence].set_result(output)

    async def load(self, checkpoint: Path, park: str = "release", **kwargs: Any) -> Any:
        values = {
            "model": str(checkpoint), "tensor_parallel_size": self.world, "skip_tokenizer_init": True, "max_input_len": 200,
            "kv_cache_config": {"max_gpu_total_bytes": 8 * MIB}, **kwargs,
        }  # fmt: skip
        launch = "mpiexec" if self.settings.launch == "mpiexec" else "spawn"
        return await self.link.ask(lambda op: Load(op, values, "LLM", park, launch, self.world, self.devices), 60)

    def generate(self, sequence: int, prompt: list[int], max_tokens: int, **changes: Any) -> asyncio.Future[Any]:
        future = self.finished[sequence] = asyncio.get_running_loop().create_future()
        self.link.send(Generate(sequence, prompt, max_tokens, [], **changes))
        return future

    def close(self) -> None:
        self.lost.cancel()
        self.link.close()
        self.processes.end("e1")


@pytest.fixture
async def serve(tmp_path: Path, environment: Callable[..., Path]) -> AsyncIterator[Callable[..., Any]]:
    started: list[Served] = []

    async def make(world: int = 1, version: str = "1.4.0rc1", launch: str = "spawn", **settings: Any) -> Served:
        python = environment(version, **settings)
        spec = EngineSpec.model_validate({"python": str(python), "launch": launch, "environment": mpi_variables(launch)})
        served = Served(tmp_path / "run", spec, world)
        started.append(served)
        await served.start()
        return served

    yield make
    for served in started:
        served.close()


async def test_tokens_of_an_iteration_come_in_one_frame(serve, checkpoint: Path) -> None:
    served = await serve(load_s=0.3)
    done = await served.load(checkpoint, sleep_config={})
    assert done.version == "1.4.0rc1"
    assert done.device_bytes[0] > 300 * MIB
    assert any("importing" in what for what in served.progress)
    ends = [served.generate(number, [number, number + 1], 20) for number in range(4)]
    assert [(await end).finish for end in ends] == ["length"] * 4
    assert all(served.tokens[number] == [number, number + 1] * 10 for number in range(4))
    assert len(served.frames) < 4 * 20, "one frame a request and token"
    stats = await served.link.ask(GetStats, 10)
    assert stats.stats[0]["iter"] == 1


async def test_log_probabilities_come_with_the_likeliest_tokens(serve, checkpoint: Path) -> None:
    served = await serve()
    await served.load(checkpoint)
    await served.generate(1, [5, 6], 2, logprobs=2)
    outputs = [output for frame in served.frames for output in frame.outputs]
    assert [value for output in outputs for value in output.logprobs] == [-0.5, -0.5]
    assert [pairs for output in outputs for pairs in output.alternatives] == [[[5, -0.5], [6, -1.5]], [[6, -0.5], [7, -1.5]]]


async def test_a_client_that_left_is_cancelled(serve, checkpoint: Path) -> None:
    """Rule 10."""
    served = await serve()
    await served.load(checkpoint)
    end = served.generate(1, [5], 100_000)
    while not served.tokens[1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    served.link.send(Cancel([1]))
    assert (await asyncio.wait_for(end, 10)).finish == "cancelled"
    assert (await served.generate(2, [7], 3)).finish == "length"


async def test_what_one_request_does_wrong_ends_that_request_only(serve, checkpoint: Path) -> None:
    served = await serve()
    await served.load(checkpoint)
    end = served.generate(1, [5] * 300, 3)
    assert "max_input_len" in (await end).error
    assert (await served.generate(2, [7], 3)).finish == "length"


async def test_a_park_is_refused_while_requests_are_in_flight_and_frees_what_it_measures(serve, checkpoint: Path) -> None:
    """Rule 5 and rule 3."""
    served = await serve()
    loaded = await served.load(checkpoint, sleep_config={})
    end = served.generate(1, [5], 100_000)
    with pytest.raises(YardError, match="1 requests are in flight"):
        await served.link.ask(Park, 10)
    served.link.send(Cancel([1]))
    await end
    parked = await served.link.ask(Park, 10)
    assert parked.device_bytes[0] == 100 * MIB
    await served.link.ask(Wake, 10)
    woken = await served.link.ask(GetStats, 10)
    assert not woken.error
    assert (await served.generate(2, [7], 3)).finish == "length"
    assert loaded.device_bytes[0] > parked.device_bytes[0]


@pytest.mark.parametrize("launch", ["spawn", "mpiexec"])
async def test_two_ranks_over_mpi_compute_park_and_end_as_one(serve, checkpoint: Path, launch: str) -> None:
    """Rule 11: one rank lost is the group lost."""
    served = await serve(2, launch=launch)
    done = await served.load(checkpoint, sleep_config={})
    assert len(done.device_bytes) == 2
    assert all(size > 300 * MIB for size in done.device_bytes)
    assert len(done.pids) == 2
    assert (await served.generate(1, [7, 8], 4)).finish == "length"
    (Path(served.settings.python).parents[1] / "crash-1").touch()
    served.generate(2, [7], 100)
    assert "gone" in await asyncio.wait_for(served.lost, 30)


async def test_an_argument_that_the_version_lacks_is_named(serve, checkpoint: Path) -> None:
    served = await serve(version="1.2.1")
    with pytest.raises(YardError, match="takes no argument sleep_config"):
        await served.load(checkpoint, sleep_config={})


async def test_construction_needs_a_gpu(serve, checkpoint: Path, tmp_path: Path, environment) -> None:
    served = Served(tmp_path / "run", EngineSpec(python=str(environment())), 1, devices=[])
    await served.start()
    try:
        with pytest.raises(YardError, match="CUDA"):
            await served.load(checkpoint)
    finally:
        served.close()


async def test_another_driver_finds_the_model_and_strangers_do_not(serve, checkpoint: Path) -> None:
    """Rule 15: only who knows the pool's secret is welcome."""
    served = await serve()
    await served.load(checkpoint)
    end = served.generate(1, [5], 100_000)
    with pytest.raises(YardError, match="does not welcome"):
        await connect(f"unix:{served.processes.socket('e1')}", "another secret", "driver")
    served.link.close()
    end.cancel()
    served.finished[1] = asyncio.get_running_loop().create_future()
    served.link = await served.dial()
    assert served.link.welcome.state == "ready"
    assert served.link.welcome.device_bytes[0] > 300 * MIB
    assert (await served.generate(2, [7], 3)).finish == "length"


async def test_without_a_driver_the_server_ends(serve, checkpoint: Path) -> None:
    served = await serve()
    served.link.close()
    assert await asyncio.to_thread(served.processes.wait, "e1", 20)
