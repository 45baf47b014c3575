"""A stand-in for `trtllm-serve --grpc` on a real socket, with the service's real names, doing what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from gateway.api.proto import trtllm_pb2 as pb
from gateway.api.proto.trtllm_pb2_grpc import TrtllmServiceServicer, add_TrtllmServiceServicer_to_server

Context = grpc.aio.ServicerContext


@dataclass
class Asked:
    """`cancelled` is set when its client goes before the end."""

    request: pb.GenerateRequest
    metadata: dict[str, str]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class TrtllmGrpc(TrtllmServiceServicer):
    """Chunks are what is new, the last response has all (without its stop token, as the service says). `hold_after`: chunks."""

    def __init__(self, ids: Sequence[int], *, credentials: grpc.ServerCredentials | None = None, key: str = "") -> None:
        self.ids = list(ids)
        self.unsent = 0  # of the ids, those that are in the last response only
        self.finish: dict[str, str | int] = {"finish_reason": "stop", "matched_token_id": 2}
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.health = "OK"
        self.hold_after: int | None = None
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self._credentials = credentials
        self._key = key
        self._server: grpc.aio.Server | None = None

    @property
    def source(self) -> str:
        return f"trtllm+grpc{'s' if self._credentials else ''}://localhost:{self.port}"

    async def start(self) -> TrtllmGrpc:
        """Also after `stop`, on the same port."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_TrtllmServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self.port}"
        credentials = self._credentials
        self.port = self._server.add_secure_port(address, credentials) if credentials else self._server.add_insecure_port(address)
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def next(self) -> Asked:
        async with asyncio.timeout(10):
            return await self.asked.get()

    async def _check(self, context: Context) -> dict[str, str]:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        if self._key and metadata.get("authorization") != f"Bearer {self._key}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong key")
        return metadata

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        await self._check(context)
        return pb.HealthCheckResponse(status=self.health)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model_id="/models/llama", max_input_len=100, max_seq_len=128, vocab_size=420)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self.aborted.put_nowait(request.request_id)
        return pb.AbortResponse(success=True)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        asked = Asked(request, await self._check(context))
        self.asked.put_nowait(asked)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        try:
            await self._answer(request, context)
        except asyncio.CancelledError:
            asked.cancelled.set()
            raise

    async def _answer(self, request: pb.GenerateRequest, context: Context) -> None:
        ids = self.ids[: request.max_tokens]
        for count, token in enumerate(ids[: len(ids) - self.unsent]):
            if self.hold_after == count:
                await asyncio.Event().wait()
            chunk = pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=9, completion_tokens=count + 1)
            if request.output_config.HasField("logprobs"):
                chunk.logprobs.append(self._logprob(token, request.output_config.logprobs))
            await context.write(pb.GenerateResponse(request_id=request.request_id, chunk=chunk))
        complete = pb.GenerateComplete(output_token_ids=ids, prompt_tokens=9, completion_tokens=len(ids) + 1, cached_tokens=4)
        complete.MergeFrom(
            pb.GenerateComplete(finish_reason="length") if len(ids) < len(self.ids) else pb.GenerateComplete(**self.finish)
        )
        await context.write(pb.GenerateResponse(request_id=request.request_id, complete=complete))

    def _logprob(self, token: int, most: int) -> pb.TokenLogprob:
        top = [pb.TopLogprob(token_id=token + rank, logprob=-0.5 - rank) for rank in range(most)]
        return pb.TokenLogprob(token_id=token, logprob=-0.5, top_logprobs=top)
