"""The words of placement: models, devices, what is placed, and why something is not. Values only; bytes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Split = Literal["replicated", "heads", "kv_heads", "hidden", "vocabulary"]
"""How tensor parallelism divides a tensor: not at all · by attention heads · by KV heads (copied when there are fewer than
shards) · evenly along one dimension · by vocabulary entries, padded."""


@dataclass(frozen=True)
class WeightPart:
    """Tensors of one layer (or outside the layers) that are divided and converted alike."""

    split: Split
    matrix: bool  # a weight matrix, which a precision applies to; else norms and biases
    elements: int
    bytes: int  # as stored


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
    # The same bytes by how they are divided; empty in a hand-made shape, whose bytes are then divided evenly.
    layer_parts: tuple[tuple[WeightPart, ...], ...] = ()
    embedding_parts: tuple[WeightPart, ...] = ()  # token (and position) embeddings: first stage; tied: last stage too
    head_parts: tuple[WeightPart, ...] = ()  # output projection: last stage
    final_parts: tuple[WeightPart, ...] = ()  # norms after the last layer: last stage
    precision: str = "auto"  # what the checkpoint is stored in
    # False for GGUF, whose blocks are repacked or de-quantized when they are loaded.
    resident_as_stored: bool = True
    expert_intermediate: int = 0  # of one expert; 0: no experts
    experts: int = 0  # routed experts of a layer, and how many of them a token goes through; 0: not known
    experts_per_token: int = 0
    encoder: bool = False  # makes one vector of a text, on one rank; `kv_heads` and `head_dim` are 1, for it keeps none
    layer_windows: tuple[int, ...] = ()  # tokens of sliding-window attention by layer, 0: all; empty: all of all layers
    # Multi-head latent attention: elements of the one compressed vector a token and layer, copied on every shard; 0: none.
    latent_elements: int = 0


@dataclass(frozen=True)
class Measured:
    """What loads truly took, by pipeline stage (the largest shard's), keys and values apart. Replaces the estimate for the
    same engine, precision, degrees, device and type."""

    engine: str
    precision: str  # as asked: may be auto
    tensor_parallel: int
    pipeline_parallel: int
    device: str
    weights: tuple[int, ...]
    workspace: tuple[int, ...]  # with communication and graphs
    type: str = ""  # as in `Device`; empty: of every type that the site has of this device


@dataclass(frozen=True)
class MeasuredSpeed:
    """What steps of one worker group truly took: see `placement.speed`. `type` as in `Device`."""

    tensor_parallel: int
    pipeline_parallel: int
    device: str
    type: str
    base_s: float
    sequence_s: float
    prompt_token_s: float


@dataclass(frozen=True)
class Slo:
    """What a model promises each request while it runs its full concurrency. None: nothing."""

    first_token_s: float | None = None  # of a prompt of `prompt_tokens`
    token_s: float | None = None  # between two tokens
    prompt_tokens: int = 512


@dataclass(frozen=True)
class Load:
    """Tokens of answers that are asked of a model, all replicas together."""

    mean_tokens_per_s: float
    peak_tokens_per_s: float


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
    queue: int = 256  # requests that may wait for a group; only simulations look at this and the next
    keep_warm_s: float = 0.0  # after its last request it is not parked for others of no higher priority
    kv_floor_bytes: int = 0  # per rank
    kv_ceiling_bytes: int | None = None  # per rank
    kv_block_tokens: int = 16
    batch_tokens: int = 512  # tokens a step may compute
    precision: str = "auto"  # auto: the checkpoint's own
    engine: str = "torch"
    pools: tuple[str, ...] = ()
    priority: int = 0
    pinned: bool = False
    measured: tuple[Measured, ...] = ()
    measured_speed: tuple[MeasuredSpeed, ...] = ()
    slo: Slo | None = None
    load: Load | None = None


class Arrival(NamedTuple):
    """One request of a trace, which simulations replay."""

    time_s: float  # since the beginning of the trace
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Device:
    """One rank of a pool."""

    pool: str
    rank: int
    node: str
    kind: str  # cpu, cuda
    capacity_bytes: int
    foreign_bytes: int = 0
    unaccounted_bytes: int = 0  # used, and nobody knows for what: nothing new comes there, and nothing leaves for it
    healthy: bool = True
    trouble: str = ""  # why it is not healthy, where that is known
    cordoned: bool = False
    nvlink_domain: str = ""
    numa: int = -1  # the NUMA node that it hangs on; -1: not known
    standby_bytes: int = 0  # host memory for the weights of parked models, this device's part of what its node has
    engines: tuple[str, ...] = ()  # what may compute in its pool; empty: anything
    type: str = ""  # as NVML names it; what it can do is in `placement.hardware`


@dataclass(frozen=True)
class PlacedGroup:
    """One worker group. Ranks stage-major: ranks[stage * tensor_parallel + shard]."""

    model: str
    pool: str
    ranks: tuple[int, ...]
    tensor_parallel: int
    pipeline_parallel: int
    bytes_per_rank: tuple[int, ...]
    standby: bool = False  # takes turns on its devices with others: it has no memory there of its own


@dataclass(frozen=True)
class Reason:
    """Why a model is not (or not also) in a place. `pool` and `rank` are None where the reason is about the model itself."""

    code: str  # memory, divisibility, pool_not_allowed, device_kind, cordoned, unhealthy, no_device, ...
    message: str
    pool: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Move:
    before: PlacedGroup
    after: PlacedGroup
    bytes: int
    seconds: float  # load at the new place from disk; the old one serves until then


@dataclass(frozen=True)
class Snapshot:
    devices: tuple[Device, ...]
    models: tuple[ModelRequest, ...]
    placed: tuple[PlacedGroup, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What should be where. `groups` contains the kept ones too; `refusals` every model with fewer groups than replicas, `notes`
    what is to be known of models that have their places.
    """

    groups: tuple[PlacedGroup, ...]
    kept: tuple[PlacedGroup, ...] = ()
    loads: tuple[PlacedGroup, ...] = ()
    unloads: tuple[PlacedGroup, ...] = ()
    refusals: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    notes: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()  # of groups that make room for others; each is among the unloads and the loads too
