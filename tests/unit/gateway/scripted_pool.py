"""A pool driver that speaks the real PoolLink protocol and does what a test tells it to."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from gateway.api.grpc_options import SERVER_OPTIONS
from gateway.api.pool_channel import TLS_SCHEME
from gateway.api.proto.pool_pb2 import DownFrame, End, Hold, Logprob, ModelLoad, Submit, Tokens, UpFrame
from gateway.api.proto.pool_pb2_grpc import PoolLinkServicer, add_PoolLinkServicer_to_server
from gateway.api.records import GroupRecord, PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY
from gateway.api.site_tls import SiteTls

SECRET = "a-secret"


class SubmittedSequence:
    """One submitted sequence, in the hands of the test."""

    def __init__(self, link: _Link, submit: Submit) -> None:
        self._link = link
        self.submit = submit
        self.cached_tokens = 0
        self.cancelled = asyncio.Event()

    def tokens(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> None:
        self._link.send(DownFrame(tokens=[Tokens(id=self.submit.id, ids=ids, logprobs=logprobs)]))

    def embedding(self, values: Sequence[float]) -> None:
        self._link.send(DownFrame(tokens=[Tokens(id=self.submit.id, ids=[0], embedding=array("f", values).tobytes())]))
        self.end("length")

    def end(self, reason: str = "stop", *, stop_token_id: int = -1, tokens: Sequence[int] = (), **fields: Any) -> None:
        """The end, with the last tokens in the same frame."""
        frame = DownFrame(ends=[End(id=self.submit.id, finish_reason=reason, stop_token_id=stop_token_id, **fields)])
        if tokens:
            frame.tokens.append(Tokens(id=self.submit.id, ids=tokens))
        self._link.send(frame)

    def fail(self, code: str, message: str, retry_after_ms: int = 0) -> None:
        end = End(id=self.submit.id, finish_reason="error", stop_token_id=-1, error_code=code, error_message=message)
        end.retry_after_ms = retry_after_ms
        self._link.send(DownFrame(ends=[end]))

    def hold(self, reason: str, wait_ms: int) -> None:
        self._link.send(DownFrame(holds=[Hold(id=self.submit.id, reason=reason, estimated_wait_ms=wait_ms)]))


class _Link:
    def __init__(self) -> None:
        self.down: asyncio.Queue[DownFrame | None] = asyncio.Queue()
        self.sequences: dict[int, SubmittedSequence] = {}

    def send(self, frame: DownFrame) -> None:
        self.down.put_nowait(frame)


class ScriptedPool(PoolLinkServicer):
    """`script`, when set, is called with each sequence as it comes; else tests take them with `next`."""

    def __init__(self, name: str = "a", models: Sequence[str] = ("m",), tls: SiteTls | None = None) -> None:
        self.name = name
        self.tls = tls
        self.models = tuple(models)
        self.port = 0
        self.incarnation = 0
        self.gateways: list[str] = []
        self.script: Callable[[SubmittedSequence], None] | None = None
        self.frames_up = 0
        self.sequences: list[SubmittedSequence] = []
        self._links: set[_Link] = set()
        self._submitted: asyncio.Queue[SubmittedSequence] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._linked = asyncio.Event()

    async def start(self) -> None:
        """Also after `stop`, on the same port, as another incarnation."""
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.so_reuseport", 0)])
        add_PoolLinkServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self.port}"
        if self.tls is not None:
            self.port = self._server.add_secure_port(address, self.tls.server_credentials())
        else:
            self.port = self._server.add_insecure_port(address)
        self.incarnation += 1
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def record(
        self, state: str = "ready", context: int = 256, extra: dict | None = None, ready_in_s: float = -1.0, **outstanding: int
    ) -> PoolRecord:
        groups = tuple(
            GroupRecord(
                model=model,
                generation=1,
                group=index,
                ranks=(0,),
                tensor_parallel=1,
                pipeline_parallel=1,
                state=state,
                context=context,
                outstanding_tokens=outstanding.get(model, 0),
                ready_in_s=ready_in_s,
            )
            for index, model in enumerate(self.models)
        )
        return PoolRecord(
            pool=self.name,
            endpoint=f"{TLS_SCHEME if self.tls else ''}127.0.0.1:{self.port}",
            incarnation=str(self.incarnation),
            node="here",
            pid=1,
            device="cpu",
            fence=1,
            revision=1,
            heartbeat_unix=0.0,
            groups=groups,
            **(extra or {}),
        )

    async def next(self) -> SubmittedSequence:
        async with asyncio.timeout(10):
            return await self._submitted.get()

    async def wait_linked(self) -> None:
        async with asyncio.timeout(10):
            await self._linked.wait()

    def idle(self) -> bool:
        return self._submitted.empty()

    def drop_links(self) -> None:
        """Ends the streams as a dying driver does."""
        self._linked.clear()
        for link in self._links:
            link.down.put_nowait(None)

    def report_load(self, model: str, outstanding_tokens: int) -> None:
        for link in self._links:
            link.send(DownFrame(loads=[ModelLoad(model=model, outstanding_tokens=outstanding_tokens)]))

    def report_step(self, step: int) -> None:
        """A step was done in which no request of this gateway got a token."""
        for link in self._links:
            link.send(DownFrame(step=step))

    async def Link(self, requests: AsyncIterator[UpFrame], context: grpc.aio.ServicerContext) -> None:
        if dict(context.invocation_metadata()).get(SECRET_METADATA_KEY) != SECRET:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret")
        link = _Link()
        self._links.add(link)
        reader = asyncio.create_task(self._read(link, requests))
        try:
            while (frame := await link.down.get()) is not None:
                await context.write(frame)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped by the test")
        finally:
            reader.cancel()
            self._links.discard(link)
            for sequence in link.sequences.values():
                sequence.cancelled.set()

    async def _read(self, link: _Link, requests: AsyncIterator[UpFrame]) -> None:
        async for frame in requests:
            self.frames_up += 1
            if frame.gateway:
                self.gateways.append(frame.gateway)
                self._linked.set()
            for submit in frame.submits:
                sequence = SubmittedSequence(link, submit)
                link.sequences[submit.id] = sequence
                self.sequences.append(sequence)
                if self.script is not None:
                    self.script(sequence)
                else:
                    self._submitted.put_nowait(sequence)
            for cancelled in frame.cancels:
                sequence = link.sequences[cancelled]
                sequence.cancelled.set()
                sequence.end("cancelled", cached_tokens=sequence.cached_tokens)


async def _serve() -> None:
    """As a process of its own: prints its port, and answers each request with one token and no end."""
    pool = ScriptedPool()
    pool.script = lambda sequence: sequence.tokens([5])
    await pool.start()
    print(pool.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
