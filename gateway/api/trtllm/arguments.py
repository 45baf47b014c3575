"""From what a worker group needs to the arguments of `tensorrt_llm.LLM`, for the version that is there. Pure.

Arguments are plain data: where one takes a configuration object it is a dictionary of that object's fields, and the engine
server makes the object. A name that the version lacks is left out where the default is right, replaced where there is another
way, and refused where neither is: `problems` says so before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.api.config import EngineSpec
from gateway.api.errors import invalid
from gateway.api.trtllm.features import SUPPORTED, Features, ParkMethod, park_method

_NEEDED = {
    "model": "to name the checkpoint",
    "tensor_parallel_size": "to divide a model",
    "pipeline_parallel_size": "to divide a model",
    "max_batch_size": "for limits.concurrency",
    "max_num_tokens": "for limits.batch_tokens",
    "max_seq_len": "for context",
    "kv_cache_config": "to bound the KV memory",
}
_TELEMETRY_SWITCHES = {"enabled": False, "enable": False, "disabled": True, "disable": True}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Demand:
    """What one worker group is to be."""

    model: str
    path: str
    tensor_parallel: int
    pipeline_parallel: int
    context: int
    concurrency: int
    batch_tokens: int
    kv_bytes: int  # on each rank
    kv_tokens: int  # that these bytes hold, for versions that take no bytes
    kv_block_tokens: int = 32
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    precision: str = "auto"  # as asked
    stored_precision: str = "auto"  # of the checkpoint
    quantization: str = ""  # algorithm of the checkpoint, such as FP8
    ranks_on_node: int = 0  # 0: all of them

    @property
    def world(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class Arguments:
    kwargs: dict[str, Any]
    entry: str  # LLM or AsyncLLM
    park: ParkMethod
    notes: tuple[str, ...] = field(default=())


def arguments(demand: Demand, features: Features, settings: EngineSpec) -> Arguments:
    """YardError(INVALID) with all `problems`."""
    found = problems(demand, features, settings)
    if found:
        raise invalid(f"model `{demand.model}`: {'; '.join(found)}")
    park = park_method(features, world=demand.world, orchestrator=settings.orchestrator, wanted=settings.park)
    notes = []
    kwargs: dict[str, Any] = {
        "model": demand.path,
        "skip_tokenizer_init": True,  # gateways tokenize
        "tensor_parallel_size": demand.tensor_parallel,
        "pipeline_parallel_size": demand.pipeline_parallel,
        "max_batch_size": demand.concurrency,
        "max_num_tokens": max(demand.batch_tokens, demand.concurrency),
        "max_seq_len": demand.context,
        "max_input_len": demand.context - 1,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": _kv(demand, features, notes),
        "cuda_graph_config": {"batch_sizes": graph_sizes(demand.concurrency), "enable_padding": True},
        "enable_iter_perf_stats": True,
    }
    if demand.precision in _DTYPES and not demand.quantization:
        kwargs["dtype"] = _DTYPES[demand.precision]
    if demand.ranks_on_node and demand.ranks_on_node != demand.world:
        kwargs["gpus_per_node"] = demand.ranks_on_node
    if settings.orchestrator == "ray":
        kwargs["orchestrator_type"] = "ray"
        kwargs["ray_placement_config"] = {"per_worker_gpu_share": settings.gpu_share}
    if park != "reload":
        # Defaults: weights come back from pinned host memory, KV comes back empty.
        kwargs.update({"sleep_config": {}} if features.has("sleep_config") else {"enable_sleep": True})
    if features.has("telemetry_config"):
        kwargs["telemetry_config"] = _telemetry(features, settings)
    kept = {name: value for name, value in kwargs.items() if features.has(name) and value is not None}
    for name in kwargs.keys() - kept.keys():
        notes.append(f"this version has no `{name}`; its own default is used")
    entry = "AsyncLLM" if park == "async_release" else "LLM"
    return Arguments(
        {name: _known_fields(name, value, features) for name, value in kept.items()}, entry, park, tuple(sorted(notes))
    )


def problems(demand: Demand, features: Features, settings: EngineSpec) -> list[str]:
    """Why this version cannot run this model, each with what to do about it."""
    found = version_problems(features, settings)
    if demand.quantization in ("W8A8_SQ_PER_CHANNEL", "W8A16") and features.release > (1, 2):
        found.append(
            f"its checkpoint is quantized to {demand.quantization}, which went with the TensorRT backend; quantize to FP8 or "
            "W4A16_AWQ (`yard engine quantize`), or use 1.2"
        )
    asked, stored = demand.precision, demand.stored_precision
    if asked in ("fp8", "int8", "int4") and asked != stored:
        found.append(
            f"precision {asked} is a matter of the checkpoint, which is {stored}; run `yard engine quantize` and name the result"
        )
    if demand.quantization and asked in _DTYPES:
        found.append(f"its checkpoint is quantized to {demand.quantization}; leave precision out, or use the original")
    if demand.kv_block_tokens & (demand.kv_block_tokens - 1):
        found.append(f"kv.block_tokens must be a power of two, not {demand.kv_block_tokens}")
    return found


def version_problems(features: Features, settings: EngineSpec) -> list[str]:
    """What the installed version lacks for any model of the site."""
    where = f"TensorRT-LLM {features.version} ({settings.python})"
    if not features.is_supported:
        span = f"{'.'.join(map(str, SUPPORTED[0]))} to {'.'.join(map(str, SUPPORTED[-1]))}"
        return [f"{where} is none of the supported releases, {span}; install one of them"]
    found = [f"{where} has no argument `{name}` ({why}); install another release" for name, why in _NEEDED.items()
             if not features.has(name)]  # fmt: skip
    if settings.orchestrator == "ray":
        if not features.has("ray_placement_config", "placement_bundle_indices"):
            found.append(
                f"{where} cannot place its ranks in a given placement group (no `ray_placement_config`), and would book the "
                "pool's GPUs twice; set engines.trtllm.orchestrator: mpi"
            )
        elif not features.ray:
            found.append(f"{where} has no Ray in its environment; install the site's version there, or use orchestrator: mpi")
    elif settings.launch == "spawn" and "wait_shutdown" not in features.mpi_session:
        found.append(
            f"{where} has no MpiPoolSession that waits for its ranks to end (`wait_shutdown`), so that memory would be promised "
            "while they hold it; set engines.trtllm.launch: mpiexec"
        )
    elif settings.launch == "mpiexec" and "trtllm-llmapi-launch" not in features.commands:
        found.append(f"{where} has no trtllm-llmapi-launch beside its interpreter; set engines.trtllm.launch: spawn")
    if features.has("telemetry_config") and not settings.telemetry and not _switch(features):
        found.append(
            f"{where} sends usage data and has no switch for it that is known here; set engines.trtllm.telemetry: true to accept"
        )
    return found


def graph_sizes(concurrency: int) -> list[int]:
    """1, 2, 4, then steps that pad at most a third, up to the concurrency itself. Each graph takes up to 200 MB."""
    sizes, size = [], 1
    while size < concurrency:
        sizes.append(size)
        size = max(size + 1, size * 3 // 2) if size >= 8 else size * 2
    return [*sizes, concurrency]


def _kv(demand: Demand, features: Features, notes: list[str]) -> dict[str, Any]:
    """Bytes, never a share of what is free (rule 4). The smallest of the library's limits wins, so the share is set to all."""
    values: dict[str, Any] = {
        "enable_block_reuse": demand.prefix_cache,
        "free_gpu_memory_fraction": 1.0,
        "tokens_per_block": demand.kv_block_tokens,
        "dtype": demand.kv_dtype,
    }
    if features.has("kv_cache_config", "max_gpu_total_bytes"):
        values["max_gpu_total_bytes"] = demand.kv_bytes
    else:
        values["max_tokens"] = demand.kv_tokens
        notes.append("this version takes KV in tokens only; the bytes were divided by those of a token")
    return values


def _switch(features: Features) -> str:
    return next((name for name in _TELEMETRY_SWITCHES if features.has("telemetry_config", name)), "")


def _telemetry(features: Features, settings: EngineSpec) -> dict[str, Any] | None:
    name = _switch(features)
    return None if settings.telemetry or not name else {name: _TELEMETRY_SWITCHES[name]}


def _known_fields(name: str, value: Any, features: Features) -> Any:
    """Fields of a configuration that this version's class has; its classes forbid others."""
    known = features.configs.get(name)
    if not isinstance(value, dict) or known is None:
        return value
    return {key: item for key, item in value.items() if key in known}
