"""LLM: construction with the library's checks, and a loop that gives every request one token an iteration."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._standin.rank import visible_devices
from tensorrt_llm._standin.ranks import OneRank, Ranks, RayActors, launched, spawned
from tensorrt_llm.llmapi.llm_args import RELEASE, TorchLlmArgs
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession
from tensorrt_llm.llmapi.sampling import SamplingParams
from tensorrt_llm_standin_gpu import ROOT, SETTINGS

STEP_S = SETTINGS.get("step_s", 0.002)


class RequestError(RuntimeError):
    pass


class RequestOutput:
    """Iterated asynchronously: the answer so far."""

    def __init__(self, llm: LLM, prompt: list[int], sampling: SamplingParams) -> None:
        self._llm = llm
        self.prompt_token_ids = prompt
        self.sampling = sampling
        self.finished = False
        self.outputs = [SimpleNamespace(index=0, text="", token_ids=[], finish_reason=None, stop_reason=None, logprobs=[])]
        self._loop = asyncio.get_running_loop()  # RuntimeError outside of one
        self._queue: asyncio.Queue[Exception | None] = asyncio.Queue()

    def abort(self) -> None:
        self._llm.abort(self)

    def advance(self) -> None:
        answer, sampling = self.outputs[0], self.sampling
        token = self.prompt_token_ids[len(answer.token_ids) % len(self.prompt_token_ids)]
        answer.token_ids.append(token)
        if sampling.logprobs is not None:
            other = SimpleNamespace(logprob=-1.5, rank=2)
            answer.logprobs.append({token: SimpleNamespace(logprob=-0.5, rank=1), token + 1: other})
        ends = (
            {sampling.end_id, *(sampling.stop_token_ids or ())} if not sampling.ignore_eos else set(sampling.stop_token_ids or ())
        )
        if token in ends:
            self.finish("stop")
        elif len(answer.token_ids) >= sampling.max_tokens:
            self.finish("length")
        self.tell(None)

    def finish(self, reason: str) -> None:
        self.outputs[0].finish_reason = reason
        self.finished = True

    def tell(self, item: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            item = await self._queue.get()
            if item is not None:
                raise item
            yield self
            if self.finished and self._queue.empty():
                return


class LLM:
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: Any = None,
        tokenizer_revision: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("executor_cls", None)
        for key in kwargs:
            if key not in {*TorchLlmArgs.model_fields, "_mpi_session", "backend"}:
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        session = kwargs.pop("_mpi_session", None)
        if not visible_devices():  # validate_dtype asks for the properties of device 0
            raise AssertionError("Torch not compiled with CUDA enabled")
        self.args: Any = TorchLlmArgs(
            model=model, tokenizer=tokenizer, tokenizer_mode=tokenizer_mode, skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code, tensor_parallel_size=tensor_parallel_size, dtype=dtype, revision=revision,
            tokenizer_revision=tokenizer_revision, **kwargs,
        )  # fmt: skip
        world = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        if len(visible_devices()) < (self.args.gpus_per_node or world) and self.args.orchestrator_type != "ray":
            raise RuntimeError(f"Only {len(visible_devices())} GPUs are available, but {world} are required")
        self._owned_session: Any = None
        self._ranks = self._make_ranks(world, session)
        kv = self.args.kv_cache_config
        plan = {"model": str(model), "world": world, "kv_bytes": getattr(kv, "max_gpu_total_bytes", 0) or 0}
        self._ranks.call("load", plan)
        self._lock = threading.Lock()
        self._running: list[RequestOutput] = []
        self._state = "running"
        self._broken: Exception | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()

    def _make_ranks(self, world: int, session: Any) -> Ranks:
        if self.args.orchestrator_type == "ray":
            os.environ["TLLM_DISABLE_MPI"] = "1"
            return RayActors(self.args.ray_placement_config, world)
        if session is not None and session.n_workers != world:
            raise ValueError(f"the session has {session.n_workers} workers, {world} are needed")
        if os.environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1":
            return launched(world)
        if world == 1:
            return OneRank()
        if session is None:
            session = self._owned_session = MpiPoolSession(world)
        return spawned(session)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: Any = None,
    ) -> RequestOutput:
        if self._state != "running" or self._broken is not None:
            raise RuntimeError("LLM is shutting down")
        sampling = sampling_params or SamplingParams()
        if len(inputs) > self.args.max_input_len:
            raise RequestError(f"the prompt has {len(inputs)} tokens, max_input_len is {self.args.max_input_len}")
        output = RequestOutput(self, list(inputs), sampling)
        with self._lock:
            self._running.append(output)
        self._wake.set()
        return output

    def abort(self, output: RequestOutput) -> None:
        with self._lock:
            if output in self._running:
                self._running.remove(output)
                output.finish("cancelled")
                output.tell(None)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        del timeout
        return [{"iter": 1, "numActiveRequests": len(self._running)}]

    def shutdown(self) -> None:
        self._state = "shutdown"
        self._wake.set()
        self._thread.join(10)
        self._ranks.close()
        if self._owned_session is not None:
            self._owned_session.shutdown()

    def _run(self) -> None:
        while self._state != "shutdown":
            if not self._running:
                self._wake.wait(0.05)
                self._wake.clear()
                continue
            time.sleep(STEP_S)
            while (ROOT / "stall").exists():
                time.sleep(0.05)
            try:
                self._ranks.call("step")
            except Exception as error:
                self._broken = RuntimeError(f"the executor ended: {error!r}")
                with self._lock:
                    for output in self._running:
                        output.tell(self._broken)
                    self._running.clear()
                return
            with self._lock:
                batch = self._running[: self.args.max_batch_size]
                for output in batch:
                    output.advance()
                self._running = [output for output in self._running if not output.finished]

    def _release(self, tags: Any = None) -> None:
        if tags is not None and not tags:
            raise ValueError("tags must not be empty")
        if not (getattr(self.args, "sleep_config", None) or getattr(self.args, "enable_sleep", False)):
            raise RuntimeError("sleep is not enabled")
        if RELEASE == "1.3" and self._running:
            raise RuntimeError(f"{len(self._running)} requests are in flight")
        while self._running:
            time.sleep(STEP_S)
        self._ranks.call("release")
        self._state = "parked"

    def _resume(self, tags: Any = None) -> None:
        self._ranks.call("resume")
        self._state = "running"


def _release(self: LLM, tags: Any = None) -> None:
    if RELEASE == "1.3" and self.args.tensor_parallel_size * self.args.pipeline_parallel_size > 1:
        raise NotImplementedError("use the Ray executor for multi-rank deployments")
    self._release(tags)


if RELEASE != "1.2":
    LLM.release = _release  # type: ignore[attr-defined]
    LLM.resume = LLM._resume  # type: ignore[attr-defined]
if RELEASE == "1.4":
    _now = inspect.signature(LLM.generate_async)
    _later = [inspect.Parameter("priority", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=0.5)]
    LLM.generate_async.__signature__ = _now.replace(parameters=[*_now.parameters.values(), *_later])  # type: ignore[attr-defined]
