"""One model in `tensorrt_llm`, whatever its version: construct, generate, release, resume, shut down.

Everything here but `generate` and `abort` blocks for seconds or minutes and is called by the main thread, where the library
expects to be constructed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from workers.engines.trtllm import probe
from workers.engines.trtllm.messages import Generate, Load

ProgressFn = Callable[[float, str], None]

RAY_NAMESPACE = "trtllm"  # the library's own: it does not initialise Ray a second time
RAY_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# Where the version wants them named: all that a model holds on the GPU.
_TAGS = ("model_weights", "model", "kv_cache", "sampler", "model_extra", "executor_extra")


class Model:
    """`loop` runs the library's asynchronous methods; it is another thread's."""

    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop, progress: ProgressFn) -> None:
        """ValueError names arguments that the version does not take; other errors are the library's own."""
        progress(0.0, "importing tensorrt_llm")
        self._library = importlib.import_module("tensorrt_llm")
        self.version = str(self._library.__version__)
        self._loop = loop
        self._load = load
        self._session: Any = None
        self._sampling = set(probe.sampling_fields())
        kwargs = self._objects(load.kwargs)
        progress(0.2, f"tensorrt_llm {self.version} imported; preparing {load.world} ranks")
        if load.orchestrator == "ray":
            kwargs["ray_placement_config"] = self._ray_placement(load)
        elif load.orchestrator == "spawn" and load.world > 1:
            # Hot swapping needs ranks that are gone when shutdown returns, which is not the default.
            sessions = importlib.import_module("tensorrt_llm.llmapi.mpi_session")
            self._session = kwargs["_mpi_session"] = sessions.MpiPoolSession(n_workers=load.world, wait_shutdown=True)
        progress(0.3, "loading the model")
        kind = probe.async_llm() if load.entry == "AsyncLLM" else self._library.LLM
        try:
            self._llm = kind(**kwargs)
            if load.entry == "AsyncLLM" and hasattr(self._llm, "setup_async"):
                self._wait(self._llm.setup_async())
        except BaseException:
            self._end_session()
            raise
        self._generate_parameters = set(inspect.signature(self._llm.generate_async).parameters)

    # ------------------------------------------------------------------ on the loop

    def generate(self, request: Generate) -> Any:
        """The library's RequestOutput, to be iterated. Raises at once when it is refused."""
        return self._llm.generate_async(
            request.prompt, sampling_params=self._library.SamplingParams(**self._sampling_of(request)), streaming=True
        )

    async def abort(self, output: Any) -> None:
        """With Ray the library waits for rank 0 in it."""
        await asyncio.get_running_loop().run_in_executor(None, output.abort)

    # ------------------------------------------------------------------ on the main thread

    def release(self) -> None:
        self._runtime_memory("release")

    def resume(self) -> None:
        self._runtime_memory("resume")

    def stats(self) -> list[dict[str, Any]]:
        """Of the iterations since the last call. Empty where the version keeps none."""
        return [dict(item) for item in self._llm.get_stats(timeout=0.5)] if hasattr(self._llm, "get_stats") else []

    def shutdown(self) -> None:
        try:
            self._llm.shutdown()
        finally:
            self._end_session()

    # ------------------------------------------------------------------ inside

    def _objects(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With configuration objects made of the dictionaries, by the classes that this version has."""
        known = probe.argument_fields().keys() | inspect.signature(self._library.LLM.__init__).parameters.keys()
        unknown = sorted(kwargs.keys() - known)
        if unknown:
            raise ValueError(
                f"TensorRT-LLM {self.version} takes no argument {', '.join(unknown)}: it was probed as another version"
            )
        made = {}
        for name, value in kwargs.items():
            kind = probe.config_class(name) if isinstance(value, dict) else None
            made[name] = kind(**value) if kind is not None else value
        return made

    def _ray_placement(self, load: Load) -> Any:
        """Ranks inside the pool's own placement group, which the library then neither makes nor removes."""
        ray = importlib.import_module("ray")
        groups = importlib.import_module("ray.util.placement_group")
        ray.init(
            address="auto",
            namespace=RAY_NAMESPACE,
            ignore_reinit_error=True,
            # Its ranks import the library: they run in this environment, not in that of the nodes' own Ray.
            runtime_env={"env_vars": RAY_ENVIRONMENT, "py_executable": sys.executable},
            log_to_driver=False,
        )
        group = groups.PlacementGroup(ray.PlacementGroupID(bytes.fromhex(load.placement_group)))
        kind = probe.config_class("ray_placement_config")
        return kind(placement_groups=[group], placement_bundle_indices=[load.bundles], **load.kwargs["ray_placement_config"])

    def _runtime_memory(self, method: str) -> None:
        call = getattr(self._llm, method)
        tags = inspect.signature(call).parameters.get("tags")
        needs_tags = tags is not None and tags.default is inspect.Parameter.empty
        result = call(list(_TAGS)) if needs_tags else call()
        if inspect.isawaitable(result):
            self._wait(result)

    def _wait(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def _end_session(self) -> None:
        """The library does not own a session that it was given."""
        if self._session is not None:
            session, self._session = self._session, None
            session.shutdown()

    def _sampling_of(self, request: Generate) -> dict[str, Any]:
        """Only what differs from greedy: the library takes a bare call as greedy decoding."""
        values: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "detokenize": False,
            "add_special_tokens": False,
            "stop_token_ids": request.stop_token_ids or None,
            "end_id": request.end_id if request.end_id >= 0 else None,
            "pad_id": request.end_id if request.end_id >= 0 else None,
            "ignore_eos": request.end_id < 0,
        }
        if request.temperature > 0:
            values.update(temperature=request.temperature, top_p=request.top_p, seed=request.seed)
            values.update({"top_k": request.top_k} if request.top_k > 0 else {})
            values.update({"min_p": request.min_p} if request.min_p > 0 else {})
        if request.repetition_penalty != 1.0:
            values["repetition_penalty"] = request.repetition_penalty
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(request, name):
                values[name] = getattr(request, name)
        if request.logprobs >= 0:
            values["logprobs"] = request.logprobs
        lacking = sorted(name for name, value in values.items() if value is not None and name not in self._sampling)
        if lacking:
            raise ValueError(f"TensorRT-LLM {self.version} has no sampling parameter {', '.join(lacking)}")
        return {name: value for name, value in values.items() if value is not None}
