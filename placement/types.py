"""The words of placement: models, devices, what is placed, and why something is not. Values only; bytes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelShape:
    """What placement must know of a checkpoint. Read from headers and config by `gateway.api.checkpoint`."""

    family: str  # transformers model_type, e.g. llama
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_context: int
    tied_embeddings: bool
    # Exact stored bytes: per decoder layer, and of what stands outside the layers (embeddings, head, final norm).
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int  # 0 when tied
    kv_bytes_per_element: int = 2


@dataclass(frozen=True)
class ModelRequest:
    """One model to place."""

    name: str
    shape: ModelShape
    device: str | None = None  # cpu, cuda or None for any
    replicas: int = 1
    tensor_parallel: int | None = None  # None: choose
    pipeline_parallel: int | None = None
    context: int = 2048
    concurrency: int = 16
    kv_floor_bytes: int = 0  # per rank
    pools: tuple[str, ...] = ()
    priority: int = 0
    pinned: bool = False


@dataclass(frozen=True)
class Device:
    """One rank of a pool."""

    pool: str
    rank: int
    node: str
    kind: str  # cpu, cuda
    capacity_bytes: int
    foreign_bytes: int = 0
    healthy: bool = True
    cordoned: bool = False
    nvlink_domain: str = ""


@dataclass(frozen=True)
class PlacedGroup:
    """One worker group. Ranks stage-major: ranks[stage * tensor_parallel + shard]."""

    model: str
    pool: str
    ranks: tuple[int, ...]
    tensor_parallel: int
    pipeline_parallel: int
    bytes_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class Reason:
    """Why a model is not (or not also) in a place. `pool` and `rank` are None where the reason is about the model itself."""

    code: str  # memory, divisibility, pool_not_allowed, device_kind, cordoned, unhealthy, no_device, ...
    message: str
    pool: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Snapshot:
    devices: tuple[Device, ...]
    models: tuple[ModelRequest, ...]
    placed: tuple[PlacedGroup, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What should be where. `groups` contains the kept ones too; `refusals` every model with fewer groups than replicas."""

    groups: tuple[PlacedGroup, ...]
    kept: tuple[PlacedGroup, ...] = ()
    loads: tuple[PlacedGroup, ...] = ()
    unloads: tuple[PlacedGroup, ...] = ()
    refusals: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
