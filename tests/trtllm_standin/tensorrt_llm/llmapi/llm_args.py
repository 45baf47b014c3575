"""TorchLlmArgs and the configurations in it, by the facts: names and defaults of the version, anything else forbidden."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from tensorrt_llm_standin_gpu import SETTINGS

FACTS = json.loads((Path(__file__).parents[2] / "llm_api.json").read_text())
RELEASE = ".".join(SETTINGS["version"].split(".")[:2])
DROPPED = set(SETTINGS.get("dropped", ()))  # names that this version is to lack, such as kv_cache_config.max_gpu_total_bytes


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _config(name: str, facts: str, base: type[BaseModel] = Strict) -> type[BaseModel]:
    fields: dict[str, Any] = {
        row["name"]: (Any, row["default"]) for row in FACTS[facts] if f"{facts}.{row['name']}" not in DROPPED
    }
    return create_model(name, __base__=base, **fields)


class _Kv(Strict):
    free_gpu_memory_fraction: Optional[float] = Field(default=0.9, ge=0, le=1)
    max_gpu_total_bytes: int = Field(default=0, ge=0)


class _Graphs(Strict):
    @model_validator(mode="after")
    def _agree(self) -> _Graphs:
        sizes, largest = getattr(self, "batch_sizes", None), getattr(self, "max_batch_size", 0)
        if sizes and largest and largest != max(sizes):
            raise ValueError("max_batch_size must equal max(batch_sizes)")
        return self


class _Placement(Strict):
    @model_validator(mode="after")
    def _together(self) -> _Placement:
        from ray.util.placement_group import PlacementGroup

        groups, indices = getattr(self, "placement_groups", None), getattr(self, "placement_bundle_indices", None)
        if (groups is None) != (indices is None) or (groups and len(groups) != len(indices)):
            raise ValueError("placement_groups and placement_bundle_indices must be given together, of the same length")
        if groups and not all(isinstance(group, PlacementGroup) for group in groups):
            raise ValueError("placement_groups must be PlacementGroup objects")
        return self


class ExecutorMemoryType(str, Enum):
    MODEL_WEIGHTS_MAIN = "model_weights"
    MODEL_ENGINE_MAIN = "model"
    KV_CACHE = "kv_cache"
    SAMPLER = "sampler"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"


KvCacheConfig = _config(
    "KvCacheConfig", "kv_cache_config", _Kv if "kv_cache_config.max_gpu_total_bytes" not in DROPPED else Strict
)
CudaGraphConfig = _config("CudaGraphConfig", "cuda_graph_config", _Graphs)
SchedulerConfig = _config("SchedulerConfig", "scheduler_config")
RayPlacementConfig = _config("RayPlacementConfig", "ray_placement_config", _Placement)


class SleepConfig(Strict):
    restore_modes: dict[ExecutorMemoryType, Literal["NONE", "MEMSET", "CPU", "PINNED"]] = {}


class TelemetryConfig(Strict):
    enabled: bool = True


_CLASSES: dict[str, Any] = {
    "kv_cache_config": (KvCacheConfig, Field(default_factory=KvCacheConfig)),
    "cuda_graph_config": (Optional[CudaGraphConfig], Field(default_factory=CudaGraphConfig)),
    "scheduler_config": (SchedulerConfig, Field(default_factory=SchedulerConfig)),
    "ray_placement_config": (Optional[RayPlacementConfig], None),
    "sleep_config": (Optional[SleepConfig], None),
    "telemetry_config": (TelemetryConfig, Field(default_factory=TelemetryConfig)),
    "orchestrator_type": (Optional[Literal["rpc", "ray"]], None),
    "tensor_parallel_size": (int, 1),
    "pipeline_parallel_size": (int, 1),
    "max_batch_size": (Optional[int], 2048),
    "max_num_tokens": (Optional[int], 8192),
    "max_input_len": (Optional[int], 1024),
}


def names(release: str = RELEASE) -> list[str]:
    """Arguments of the release, by where the facts saw them: 1.2 in the API-stability files, 1.3 in the page before the
    change to `sleep_config`, 1.4 after it."""
    rows = FACTS["llm_init"]["parameters"]
    if release == "1.2":
        known = [row["name"] for row in rows if {row["source"], *row["also_in"]} & {"Y12", "C12"}]
        found = [*known, *(row["name"] for row in FACTS["llm_init"]["only_in_older_yaml"])]
    else:
        without = {"sleep_config"} if release == "1.3" else {"enable_sleep", "decoding_config"}
        found = [row["name"] for row in rows if row["name"] not in without] + ["telemetry_config"]
    return [name for name in dict.fromkeys(found) if name not in DROPPED and name != "_mpi_session"]


def _default(name: str) -> Any:
    rows = {row["name"]: row["default"] for row in FACTS["llm_init"]["parameters"]}
    default = rows.get(name)
    return ... if default == "REQUIRED" else None if default == "FACTORY" else default


class _Llm(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


TorchLlmArgs = create_model(
    "TorchLlmArgs", __base__=_Llm, **{name: _CLASSES.get(name, (Any, _default(name))) for name in names()}
)
