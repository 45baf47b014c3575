"""What processes tell each other about the state of the site, through Redis and the admin service. Plain values, JSON by msgspec.

Observed records carry a heartbeat and expire; nothing here is ever the desired state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.api.trtllm.features import Features

ModelState = Literal["waiting", "loading", "checking", "ready", "draining", "parked", "failed"]
"""waiting: assigned, not begun · checking: the canary runs · draining: finishes its requests, takes no new ones ·
parked: a request brings it back."""


DEVICE = "device"
"""Who owns the ledger lines that are no group's."""


class RankRecord(msgspec.Struct, frozen=True):
    """One rank of a pool and its ledger."""

    index: int
    node: str
    pid: int
    device: str
    capacity_bytes: int
    # (model, kind, bytes); kind is weights, kv_floor, kv_used, workspace, communication, grammar, context or foreign
    ledger: tuple[tuple[str, str, int], ...] = ()
    alive: bool = True
    type: str = ""  # as NVML names the card, e.g. NVIDIA H200
    nvlink_domain: str = ""  # cards with the same one on a node reach each other over NVLink
    numa: int = -1  # the NUMA node that the card hangs on; -1: not known
    trouble: str = ""  # why the card should take nothing, e.g. uncorrectable memory errors
    unaccounted_bytes: int = 0  # what the device's driver says is used, above all that is known
    utilization: float = -1.0  # of the device in the last seconds, 0 to 1; -1: not known
    used_bytes: int = 0  # of the whole device, by whomever; cpu: what the rank's process has in memory
    total_bytes: int = 0
    link_bytes_per_s: float = 0.0  # from host memory into the device, as measured at the rank's start; 0: not known

    @property
    def word(self) -> str:
        """What its process does: a rank that ran before is known by its node, and its pool starts it again."""
        return "alive" if self.alive else "restarting" if self.node else "starting"

    @property
    def taken(self) -> tuple[tuple[str, str, int], ...]:
        """Lines of the ledger that no model could have, from the rank's start on: its own context, and what others hold."""
        return tuple(line for line in self.ledger if line[1] == "foreign" or line[:2] == (DEVICE, "context"))


class GroupRecord(msgspec.Struct, frozen=True):
    """One worker group of a model in a pool."""

    model: str
    generation: int
    group: int
    ranks: tuple[int, ...]
    tensor_parallel: int
    pipeline_parallel: int
    state: ModelState
    reason: str = ""
    progress: float = 0.0
    engine: str = "torch"
    precision: str = ""
    digest: str = ""
    context: int = 0
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    ready_since_unix: float = 0.0
    ready_in_s: float = -1.0  # of one that is loaded, checked or woken: until it serves, as its driver estimates; -1: not known
    # Of a group whose state is parked: parked, cold, or on its way: parking, waking. Else empty.
    residency: str = ""
    standby_bytes: int = 0  # of its weights, outside the pool's memory, over all its ranks
    # Of its KV memory, over all its ranks: mapped, held by sequences, and unused below the last block in use (fragmentation).
    kv_bytes: int = 0
    kv_used_bytes: int = 0
    kv_hole_bytes: int = 0


class SwitchRecord(msgspec.Struct, frozen=True):
    """What bringing a model in took, by path: remap (KV memory grew), park, wake, load."""

    path: str
    count: int
    last_s: float
    median_s: float
    longest_s: float
    total_s: float = 0.0
    bytes: int = 0  # moved by all of them
    link_share: float = 0.0  # of the last one: its speed against what the link can do; 0: not known
    buckets: tuple[int, ...] = ()  # of gateway.api.buckets


class ModelTotals(msgspec.Struct, frozen=True):
    """What a driver has computed of one model since it started."""

    model: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, that were not computed because their keys and values were there
    completion_tokens: int = 0
    failed: int = 0  # sequences that ended with an error


class TrtllmRecord(msgspec.Struct, frozen=True):
    """What a pool knows of its TensorRT-LLM. Without features: the problem, or it is being asked."""

    settings_json: str  # EngineSpec
    features: Features | None = None
    problem: str = ""


class FootprintRecord(msgspec.Struct, frozen=True):
    """What a worker group really takes, as its ranks measured it. Each load of the same sort, which `sort` names, takes so much.

    Bytes by pipeline stage, of its largest shard. Keys and values, which depend on what is asked, are given for one token.
    """

    digest: str  # of the checkpoint
    engine: str
    version: str  # of the engine: another one may take something else
    precision: str  # as asked: may be auto
    device: str
    type: str  # of the devices; empty when they differ
    tensor_parallel: int
    pipeline_parallel: int
    batch_tokens: int
    concurrency: int
    context: int
    weights: tuple[int, ...]
    workspace: tuple[int, ...]  # with communication, context and graphs
    kv_token: tuple[int, ...]

    @property
    def sort(self) -> tuple[str | int, ...]:
        degrees = (self.tensor_parallel, self.pipeline_parallel)
        limits = (self.batch_tokens, self.concurrency, self.context)
        return (self.digest, self.engine, self.precision, self.device, self.type, *degrees, *limits)


class PoolRecord(msgspec.Struct, frozen=True):
    """A pool driver's heartbeat. `incarnation` changes with every start of the driver."""

    pool: str
    endpoint: str  # of its PoolLink and PoolControl services: host:port, with tls:// before it where they speak TLS
    incarnation: str
    node: str
    pid: int
    device: str
    fence: int
    revision: int
    heartbeat_unix: float
    ranks: tuple[RankRecord, ...] = ()
    groups: tuple[GroupRecord, ...] = ()
    version: str = ""
    last_step_unix: float = 0.0
    message: str = ""  # why the pool is not serving, when it is not
    switches: tuple[SwitchRecord, ...] = ()
    totals: tuple[ModelTotals, ...] = ()
    started_unix: float = 0.0
    rank_restarts: int = 0  # since the driver started
    steps: int = 0
    held: int = 0  # requests that wait for their model
    trtllm: TrtllmRecord | None = None
    engine_versions: dict[str, str] = {}  # as far as they are known
    footprints: tuple[FootprintRecord, ...] = ()  # of the groups that are in memory


class GatewayRecord(msgspec.Struct, frozen=True):
    gateway: str
    node: str
    pid: int
    grpc_endpoint: str
    http_endpoint: str
    revision: int  # newest site revision it serves from
    heartbeat_unix: float
    requests_in_flight: int = 0
    degraded: bool = False
    version: str = ""
    servers: tuple[GroupRecord, ...] = ()  # models whose servers run elsewhere, as this gateway finds them; without ranks


class DesiredObject(msgspec.Struct, frozen=True):
    """One stored object. `manifest` is the whole YAML document as plain data."""

    kind: str
    name: str
    generation: int
    revision: int
    manifest: dict
    updated_unix: float
    actor: str = ""
    # Routes: what it was before its last switch, for one-command rollback.
    previous: dict | None = None


class NodeRecord(msgspec.Struct, frozen=True):
    """A living node of the site's Ray: what it has for pools, taken or not."""

    node: str
    pool_mib: int  # host memory that cpu pools may take
    gpus: int
    labels: dict[str, str] = {}


class ControllerRecord(msgspec.Struct, frozen=True):
    owner: str
    fence: int
    pid: int
    heartbeat_unix: float
    # model -> reasons why some of its replicas are nowhere
    unplaced: dict[str, tuple[str, ...]] = {}
    message: str = ""
    nodes: tuple[NodeRecord, ...] = ()


class RouteStatus(msgspec.Struct, frozen=True):
    name: str
    generation: int
    targets: tuple[tuple[str, int], ...]
    aliases: tuple[str, ...]
    ready: bool


class SiteStatus(msgspec.Struct, frozen=True):
    """What `yard ps` shows."""

    site: str
    revision: int
    redis: Literal["ok", "degraded"]
    pools: tuple[PoolRecord, ...]
    gateways: tuple[GatewayRecord, ...]
    controller: ControllerRecord | None
    models: tuple[DesiredObject, ...]
    routes: tuple[RouteStatus, ...]
    awaited: tuple[str, ...] = ()  # desired pools whose driver is not heard: it starts, or starts again


class Keys:
    """Every Redis key of a site. One hash tag, so that a script may touch several in a Redis Cluster."""

    def __init__(self, site: str) -> None:
        self.prefix = f"{{modelyard:{site}}}"
        self.revision = f"{self.prefix}:revision"
        self.identity = f"{self.prefix}:identity"  # which store this is; gone with everything else when it is emptied
        self.audit = f"{self.prefix}:audit"  # stream of every change to desired state
        self.events = f"{self.prefix}:events"  # stream of what happened to observed state
        self.changes = f"{self.prefix}:changes"  # channel: revision of each committed change
        self.observed = f"{self.prefix}:observed"  # channel: "pool:NAME" or "gateway:ID" whose record changed
        self.pools = f"{self.prefix}:pools"  # set of names that have or had a heartbeat
        self.gateways = f"{self.prefix}:gateways"
        self.written = f"{self.prefix}:written"  # by who tries whether the store takes writes
        self.controller = f"{self.prefix}:controller"  # ControllerRecord, with TTL
        self.lease = f"{self.prefix}:lease:controller"
        self.placement = f"{self.prefix}:placement"  # the controller's: which groups belong where
        self.footprints = f"{self.prefix}:footprints"  # the controller's: what loads took, as drivers measured it
        self.fence = f"{self.prefix}:fence"  # counter of fencing tokens
        self.tombstones = f"{self.prefix}:desired:deleted"  # hash: "Kind/name" -> generation of the deletion
        self.canaries = f"{self.prefix}:canaries"  # hash: placement key -> answer

    def desired(self, kind: str) -> str:
        """Hash of name -> DesiredObject."""
        return f"{self.prefix}:desired:{kind}"

    def pool(self, name: str) -> str:
        """PoolRecord, with TTL."""
        return f"{self.prefix}:pool:{name}"

    def quota(self, tenant: str) -> str:
        """Hash: what is left of a tenant's quotas, and since when."""
        return f"{self.prefix}:quota:{tenant}"

    def gateway(self, gateway: str) -> str:
        return f"{self.prefix}:gateway:{gateway}"


HEARTBEAT_S = 1.0
HEARTBEAT_TTL_S = 5.0
