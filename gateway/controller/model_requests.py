"""From a model's specification and its checkpoint to what placement is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.api.checkpoint import Checkpoint, open_checkpoint
from gateway.api.config import ModelSpec
from gateway.api.errors import YardError
from gateway.state.view import ModelEntry
from placement.types import Load, ModelRequest, ModelShape, Slo

log = logging.getLogger(__name__)

RETRY_S = 10.0
REREAD_S = 60.0
READING = "its checkpoint is being read"


@dataclass(frozen=True)
class AskedModel:
    """A desired model. `request` is None while its checkpoint cannot be read, and `problem` says why."""

    spec: ModelSpec
    generation: int
    request: ModelRequest | None
    problem: str = ""
    digest: str = ""  # of the checkpoint


def model_request(name: str, spec: ModelSpec, checkpoint: Checkpoint) -> ModelRequest:
    return ModelRequest(
        name=name,
        shape=_shape(spec, checkpoint),
        device="cuda" if spec.engine == "trtllm" else None,
        replicas=spec.replicas,
        tensor_parallel=None if spec.tensor_parallel == "auto" else spec.tensor_parallel,
        pipeline_parallel=None if spec.pipeline_parallel == "auto" else spec.pipeline_parallel,
        context=spec.context or checkpoint.max_context,
        concurrency=spec.limits.concurrency,
        queue=spec.limits.queue,
        keep_warm_s=spec.keep_warm_s,
        kv_floor_bytes=spec.kv.floor,
        kv_ceiling_bytes=spec.kv.ceiling,
        kv_block_tokens=spec.kv.block_tokens,
        batch_tokens=spec.limits.batch_tokens,
        precision=spec.precision,
        engine=spec.engine,
        pools=spec.pools,
        priority=spec.priority,
        pinned=spec.residency == "resident",
        slo=_slo(spec),
        load=Load(spec.load.mean_tokens_per_s, spec.load.peak_tokens_per_s) if spec.load else None,
    )


def _shape(spec: ModelSpec, checkpoint: Checkpoint) -> ModelShape:
    """With keys and values as the engine keeps them: TensorRT-LLM in 8 bits where the checkpoint was calibrated for it."""
    if spec.engine == "trtllm" and checkpoint.kv_quantization == "FP8":
        return replace(checkpoint.shape, kv_bytes_per_element=1)
    return checkpoint.shape


def _slo(spec: ModelSpec) -> Slo | None:
    if spec.slo is None:
        return None
    first_ms, token_ms = spec.slo.first_token_ms, spec.slo.token_ms
    return Slo(
        first_token_s=None if first_ms is None else first_ms / 1000,
        token_s=None if token_ms is None else token_ms / 1000,
        prompt_tokens=spec.slo.prompt_tokens,
    )


@dataclass
class _Reading:
    """What is known of one source. A failed reading is repeated after RETRY_S, a good one after REREAD_S."""

    checkpoint: Checkpoint | None = None
    problem: str = READING
    due: float = 0.0
    task: asyncio.Task[None] | None = None


class Checkpoints:
    """Reads checkpoints in a thread, one at a time, and remembers them. `on_read` is called in the loop after each."""

    def __init__(self, cache_dir: Path, on_read: Callable[[], None] = lambda: None) -> None:
        self._cache_dir = cache_dir
        self._on_read = on_read
        self._readings: dict[str, _Reading] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")

    def asked(self, models: Mapping[str, ModelEntry]) -> dict[str, AskedModel]:
        """What is known now of those that are managed, at once; readings that are due begin."""
        models = {name: entry for name, entry in models.items() if entry.spec.is_managed}
        wanted = {entry.spec.source for entry in models.values()}
        for source in self._readings.keys() - wanted:
            if self._readings[source].task is None:
                del self._readings[source]
        return {name: self._asked(name, entry) for name, entry in models.items()}

    async def settle(self, models: Mapping[str, ModelEntry]) -> dict[str, AskedModel]:
        """The same after all their sources were read once."""
        self.asked(models)
        tasks = [self._readings[entry.spec.source].task for entry in models.values() if entry.spec.is_managed]
        await asyncio.gather(*(task for task in tasks if task is not None))
        return self.asked(models)

    def close(self) -> None:
        for reading in self._readings.values():
            if reading.task is not None:
                reading.task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _asked(self, name: str, entry: ModelEntry) -> AskedModel:
        spec, generation = entry
        reading = self._readings.setdefault(spec.source, _Reading())
        if reading.task is None and time.monotonic() >= reading.due:
            reading.task = asyncio.create_task(self._read(spec.source, reading), name=f"read {spec.source}")
        if reading.checkpoint is None:
            return AskedModel(spec, generation, None, reading.problem)
        longest = reading.checkpoint.max_context
        if spec.context is not None and spec.context > longest:
            problem = f"spec.context is {spec.context}, and {spec.source} takes at most {longest} tokens; lower it or leave it"
            return AskedModel(spec, generation, None, problem)
        return AskedModel(spec, generation, model_request(name, spec, reading.checkpoint), digest=reading.checkpoint.digest)

    async def _read(self, source: str, reading: _Reading) -> None:
        loop = asyncio.get_running_loop()
        try:
            reading.checkpoint = await loop.run_in_executor(self._thread, open_checkpoint, source, self._cache_dir)
            reading.due = time.monotonic() + REREAD_S
        except (YardError, OSError) as error:
            # A checkpoint that was read before stays known: a mount that is gone for a moment moves no model.
            reading.problem = str(error)
            reading.due = time.monotonic() + RETRY_S
            log.warning("checkpoint %s: %s", source, error)
        finally:
            reading.task = None
        self._on_read()
