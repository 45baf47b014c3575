"""A server that speaks TensorRT-LLM's gRPC service (`trtllm-serve --grpc`): it takes token ids and sends token ids."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence

import grpc

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError, invalid, shortened, unavailable
from gateway.api.grpc_options import MAX_MESSAGE_BYTES
from gateway.api.proto import trtllm_pb2 as pb
from gateway.api.proto.pool_pb2 import End, Logprob, Submit, Tokens
from gateway.api.proto.trtllm_pb2_grpc import TrtllmServiceStub
from gateway.api.tasks import cancelled
from gateway.link.flight import Text
from gateway.link.server import Answer, Facts, Unreachable
from gateway.link.server_key import authorities, key_headers, system_authorities
from gateway.link.words import Words

LOOK_TIMEOUT_S = 5.0
ABORT_S = 2.0
RETRY_AFTER_S = 1.0

# Without keepalive pings: a server that is not ours may close connections that ping often. The looks find one that is gone.
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

_FINISH = {"stop": "stop", "stop_word": "stop", "length": "length"}
_CODE = grpc.StatusCode
_REFUSALS = (_CODE.INVALID_ARGUMENT, _CODE.OUT_OF_RANGE, _CODE.FAILED_PRECONDITION)


class TrtllmServer:
    """Chunks hold what is new of the tokens, the last response all of them. Whoever leaves is aborted there by name too."""

    def __init__(self, model: str, spec: ModelSpec) -> None:
        address = spec.address
        assert address is not None
        self._model = model
        self._spec = spec
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._facts: Facts | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._where = f"the server of model `{model}` at {address.target}"

    async def look(self) -> Facts:
        stub, metadata = self._stub(), self._metadata()
        try:
            health = await stub.HealthCheck(pb.HealthCheckRequest(), timeout=LOOK_TIMEOUT_S, metadata=metadata)
            if self._facts is None:
                info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=LOOK_TIMEOUT_S, metadata=metadata)
                self._facts = Facts(max(0, info.max_seq_len))
        except grpc.aio.AioRpcError as error:
            self._facts = None  # another may stand there when it is back
            raise self._error(error) from error
        if health.status not in ("", "OK"):
            raise unavailable(f"{self._where} says of its health: {shortened(health.status, 256)}")
        return self._facts

    async def close(self) -> None:
        await cancelled(self._aborts)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def answer(self, submit: Submit, words: Words) -> Answer:
        return self._answer(submit, words)

    async def _answer(self, submit: Submit, words: Words) -> AsyncGenerator[Text | Tokens | End, None]:
        # Clients may use a name twice, and each choice is a request of its own here.
        name = f"{uuid.uuid4().hex[:12]}-{submit.request_id}"
        timeout_s = submit.timeout_ms / 1000 if submit.timeout_ms else None
        metadata = [*self._metadata(), *((("traceparent", submit.traceparent),) if submit.traceparent else ())]
        call = self._stub().Generate(_request(name, submit, words), timeout=timeout_s, metadata=metadata)
        seen, ended = 0, False
        try:
            async for response in call:
                if response.HasField("chunk"):
                    seen += len(response.chunk.token_ids)
                    yield _tokens(response.chunk.token_ids, response.chunk.logprobs, submit)
                    continue
                ended, complete = True, response.complete
                if rest := complete.output_token_ids[seen:]:  # what was in no chunk
                    yield _tokens(rest, complete.logprobs[seen:], submit)
                if complete.matched_stop_str:
                    yield Text("", stop_reason=complete.matched_stop_str)
                yield _end(complete)
                return
        except grpc.aio.AioRpcError as error:
            ended = True
            raise self._error(error) from error
        finally:
            call.cancel()
            if not ended:
                self._abort(name)
        ended = True
        raise unavailable(f"{self._where} ended its answer without a reason", RETRY_AFTER_S)

    def _abort(self, name: str) -> None:
        task = asyncio.create_task(self._ask_to_abort(name), name=f"abort-{name}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _ask_to_abort(self, name: str) -> None:
        """The cancelled call says the same; where that is not heeded, this is."""
        with contextlib.suppress(grpc.aio.AioRpcError, YardError):
            await self._stub().Abort(pb.AbortRequest(request_id=name), timeout=ABORT_S, metadata=self._metadata())

    def _stub(self) -> TrtllmServiceStub:
        if self._channel is None:
            if self._address.tls:
                credentials = grpc.ssl_channel_credentials(authorities(self._spec.server) or system_authorities())
                self._channel = grpc.aio.secure_channel(self._address.target, credentials, options=OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self._address.target, options=OPTIONS)
        return TrtllmServiceStub(self._channel)

    def _metadata(self) -> list[tuple[str, str]]:
        return list(key_headers(self._spec.server).items())

    def _error(self, error: grpc.aio.AioRpcError) -> YardError:
        code, said = error.code(), f"{self._where} said {error.code().name}: {shortened(error.details() or 'nothing', 500)}"
        if code is _CODE.UNAVAILABLE:
            return Unreachable(f"{self._where} cannot be reached: {shortened(error.details() or 'no reason given', 500)}")
        if code is _CODE.RESOURCE_EXHAUSTED:
            return YardError(ErrorCode.EXHAUSTED, said, retry_after_s=_retry_after_s(error))
        if code in _REFUSALS:
            return invalid(said)
        if code is _CODE.DEADLINE_EXCEEDED:
            return YardError(ErrorCode.DEADLINE, said)
        if code in (_CODE.UNAUTHENTICATED, _CODE.PERMISSION_DENIED):
            return unavailable(f"{said}; see server.key_env and server.key_file of model `{self._model}`", RETRY_AFTER_S)
        if code is _CODE.UNIMPLEMENTED:
            return unavailable(f"{said}; it must be `trtllm-serve --grpc`, which has trtllm.TrtllmService", RETRY_AFTER_S)
        if code in (_CODE.INTERNAL, _CODE.UNKNOWN, _CODE.DATA_LOSS):
            return YardError(ErrorCode.INTERNAL, said)
        return unavailable(said, RETRY_AFTER_S)


def _request(name: str, submit: Submit, words: Words) -> pb.GenerateRequest:
    given = submit.sampling
    sampling = pb.SamplingConfig(beam_width=1, num_return_sequences=1, seed=given.seed, temperature=given.temperature)
    if given.temperature == 0:
        sampling.top_k = 1
    elif given.top_k:
        sampling.top_k = given.top_k
    if given.top_p and given.temperature:
        sampling.top_p = given.top_p
    if given.min_p and given.temperature:
        sampling.min_p = given.min_p
    if given.repetition_penalty not in (0.0, 1.0):
        sampling.repetition_penalty = given.repetition_penalty
    if given.presence_penalty:
        sampling.presence_penalty = given.presence_penalty
    if given.frequency_penalty:
        sampling.frequency_penalty = given.frequency_penalty
    output = pb.OutputConfig(exclude_input_from_output=True)
    if given.logprobs >= 0:
        output.logprobs = max(1, given.logprobs)
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_token_ids=submit.prompt_ids),
        sampling_config=sampling,
        output_config=output,
        max_tokens=submit.max_tokens,
        streaming=True,
        stop=words.stop,
        stop_token_ids=submit.stop_token_ids,
        ignore_eos=submit.ignore_eos,
    )


def _tokens(ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob], submit: Submit) -> Tokens:
    """With log-probabilities when they were asked for and there is one for each token."""
    tokens = Tokens(ids=ids)
    most = submit.sampling.logprobs
    if most >= 0 and len(logprobs) == len(ids):
        for logprob in logprobs:
            top = logprob.top_logprobs[:most]
            tokens.logprobs.append(
                Logprob(
                    logprob=logprob.logprob,
                    alternative_ids=[one.token_id for one in top],
                    alternative_logprobs=[one.logprob for one in top],
                )
            )
    return tokens


def _end(complete: pb.GenerateComplete) -> End:
    return End(
        finish_reason=_FINISH.get(complete.finish_reason, "cancelled"),
        stop_token_id=complete.matched_token_id if complete.HasField("matched_token_id") else -1,
        prompt_tokens=complete.prompt_tokens,
        completion_tokens=complete.completion_tokens,
        cached_tokens=complete.cached_tokens,
    )


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    trailing = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    with contextlib.suppress(ValueError):
        if "retry-after-ms" in trailing:
            return min(max(int(trailing["retry-after-ms"]) / 1000, 0.1), 3600.0)
        return min(max(float(trailing.get("retry-after", RETRY_AFTER_S)), 0.1), 3600.0)
    return RETRY_AFTER_S
