"""The driver of a pool without rank processes, and what a gateway sees of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from gateway.api.config import EngineSpec, ModelSpec, PoolSpec
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from workers.driver.effects import ModelFacts
from workers.driver.reader import CheckpointReader
from workers.driver.replica import PoolDriverReplica

SECRET = "not-a-secret"
MIB = 2**20


class Reader(CheckpointReader):
    """Reads the checkpoint; its canary needs no tokenizer."""

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        return super().facts(model, spec)

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (3, 4)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return "" if list(tokens[:4]) == [3, 4, 3, 4] else f"answered {tokens}"


class Pool:
    def __init__(self, directory: Path, settings: EngineSpec, devices: int, memory: int) -> None:
        self._spec = PoolSpec(device="cuda", devices=devices, memory=memory, engines=("trtllm",), rank_grace_s=20.0)
        self._environment = Path(settings.python or "").parents[1]
        self._runtime = Runtime(
            site="test",
            redis_url="",
            secret=SECRET,
            cache_dir=str(directory / "cache"),
            run_dir=str(directory / "r"),
            bind_host="127.0.0.1",
            trtllm=settings.model_dump_json(),
        )
        self.directory = directory / "r" / "pools" / "p"
        self.events: list[tuple[str, str, str]] = []
        self._fence = 1
        self._assigned: tuple[pool_pb2.Assignment, ...] = ()
        self.driver = self._new_driver()
        self._channel: grpc.aio.Channel | None = None

    def _new_driver(self) -> PoolDriverReplica:
        reader = Reader(Path(self._runtime.cache_dir), answers=None)  # type: ignore[arg-type]
        driver = PoolDriverReplica(self._runtime, "p", self._spec.model_dump_json(), reader=reader)
        plain = driver.loop.event

        def event(kind: str, subject: str, message: str) -> None:
            self.events.append((kind, subject, message))
            plain(kind, subject, message)

        driver.loop.event = event  # type: ignore[method-assign]
        return driver

    def standin(self, name: str) -> Path:
        """A file that the stand-in looks for."""
        return self._environment / name

    async def start(self) -> None:
        await self.driver.start()
        self._channel = grpc.aio.insecure_channel(self.driver.endpoint)

    async def restart_driver(self) -> None:
        await self._close(end_ranks=False)
        self.driver = self._new_driver()
        await self.start()
        await self.assign(*self._assigned)

    async def stop(self) -> None:
        await self._close(end_ranks=True)

    async def _close(self, *, end_ranks: bool) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.driver.stop(end_ranks=end_ranks)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SECRET_METADATA_KEY, SECRET),)

    async def assign(self, *assignments: pool_pb2.Assignment, fence: int = 1) -> None:
        self._assigned = assignments
        control = pool_pb2_grpc.PoolControlStub(self._channel)
        await control.Assign(pool_pb2.AssignRequest(fence=fence, assignments=assignments), metadata=self._metadata)

    async def link(self) -> Link:
        link = Link(pool_pb2_grpc.PoolLinkStub(self._channel).Link(metadata=self._metadata))
        await link.call.write(pool_pb2.UpFrame(gateway="g"))
        return link

    async def ready(self, model: str) -> None:
        def is_ready() -> bool:
            return any(group.model == model and group.state == "ready" for group in self.driver.record().groups)

        await until(is_ready, self.driver.record)


class Link:
    """Collects what comes down."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, pool_pb2.End] = {}
        self._next = 1

    async def submit(self, prompt: Sequence[int], max_tokens: int, model: str) -> int:
        number = self._next
        self._next += 1
        sampling = pool_pb2.SamplingParams(top_p=1, repetition_penalty=1, logprobs=-1)
        submit = pool_pb2.Submit(id=number, model=model, prompt_ids=prompt, max_tokens=max_tokens, sampling=sampling)
        await self.call.write(pool_pb2.UpFrame(submits=[submit]))
        return number

    async def cancel(self, number: int) -> None:
        await self.call.write(pool_pb2.UpFrame(cancels=[number]))

    async def next(self) -> None:
        """Until some tokens have come."""
        seen = sum(map(len, self.tokens.values()))
        while sum(map(len, self.tokens.values())) == seen:
            await self._read()

    async def end_of(self, number: int) -> pool_pb2.End:
        while number not in self.ends:
            await self._read()
        return self.ends[number]

    async def _read(self) -> None:
        async with asyncio.timeout(40):
            frame = await self.call.read()
        assert isinstance(frame, pool_pb2.DownFrame), "the stream ended"
        for tokens in frame.tokens:
            self.tokens.setdefault(tokens.id, []).extend(tokens.ids)
        self.ends.update({end.id: end for end in frame.ends})


def assignment(model: str, checkpoint: Path, ranks: Sequence[int], **changes: object) -> pool_pb2.Assignment:
    limits = {"concurrency": 4, "queue": 8, "batch_tokens": 64}
    kv = {"floor": 8 * MIB, "block_tokens": 32}
    spec = {"source": f"file:{checkpoint}", "engine": "trtllm", "kv": kv, "limits": limits, **changes}
    group = pool_pb2.Group(ranks=ranks, tensor_parallel=len(ranks), pipeline_parallel=1)
    return pool_pb2.Assignment(
        model=model, generation=1, spec_json=ModelSpec.model_validate(spec).model_dump_json(), groups=[group]
    )


async def until(condition: Callable[[], bool], describe: Callable[[], object], timeout_s: float = 40.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(describe()) from None
