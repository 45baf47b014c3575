"""The objects a site is made of, as ops write them in YAML: Model, Route, Pool, Tenant, and the Site they live in.

Each document is `apiVersion: modelyard/v1`, `kind`, `metadata.name`, `spec`. Unknown keys are errors (rule 14); reading
files with line numbers is `gateway/api/manifest.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from gateway.api.server_source import FORMS, ServerAddress, server_address

API_VERSION = "modelyard/v1"
NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: Any) -> int:
    """`512MiB`, `1.5 GiB`, `24GB` or a plain number of bytes. ValueError names the accepted units."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 512MiB, 1.5GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2]])


_BYTES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(B|[KMGT]iB|[KMG]B)?\s*$"},
    ]
}
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0), WithJsonSchema(_BYTES_SCHEMA)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""Of an HTTP header or a key of gRPC metadata; both are lower case here."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KvSpec(Strict):
    """Memory for keys and values, per rank. The floor is always held; growth up to the ceiling comes from what is free."""

    floor: Bytes = Field(default=64 * 2**20, description="Bytes per rank that the model is guaranteed.")
    ceiling: Bytes | None = Field(default=None, description="Bytes per rank it may grow to. Default: what its limits need.")
    block_tokens: int = Field(default=16, ge=1, le=256, description="Tokens per KV block.")
    prefix_cache: bool = True


class LimitsSpec(Strict):
    concurrency: int = Field(default=16, ge=1, le=4096, description="Sequences computed at once, per worker group.")
    queue: int = Field(default=256, ge=0, description="Sequences that may wait, per worker group; beyond it RESOURCE_EXHAUSTED.")
    batch_tokens: int = Field(default=512, ge=16, description="Tokens a step may compute (prefill chunks plus decodes).")


class SloSpec(Strict):
    """What each request is promised while the model runs its full concurrency. Placement chooses degrees and devices for it."""

    first_token_ms: float | None = Field(default=None, gt=0, description="To the first token of `prompt_tokens` tokens.")
    token_ms: float | None = Field(default=None, gt=0, description="Between two tokens of one answer.")
    prompt_tokens: int = Field(default=512, ge=1)

    @model_validator(mode="after")
    def _check(self) -> SloSpec:
        if self.first_token_ms is None and self.token_ms is None:
            raise ValueError("an slo needs first_token_ms or token_ms")
        return self


class LoadSpec(Strict):
    """What is expected of a model, all replicas together. Placement keeps models that are busy together apart."""

    mean_tokens_per_s: float = Field(ge=0, description="Tokens of answers in a second, on average.")
    peak_tokens_per_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> LoadSpec:
        if self.peak_tokens_per_s < self.mean_tokens_per_s:
            raise ValueError("peak_tokens_per_s must not be below mean_tokens_per_s")
        return self


class CanarySpec(Strict):
    """The prompt a worker group must answer before it serves (rule 8). Greedy, `max_tokens` long."""

    prompt: str = "The capital of France is"
    max_tokens: int = Field(default=8, ge=1, le=64)
    expect: str | None = Field(
        default=None, description="Text the answer must contain. Absent: the first answer on a placement is stored and compared."
    )


class ScalingSpec(Strict):
    """Replicas by load: sequences that run or wait, over what the ready replicas can run at once."""

    min_replicas: int = Field(default=1, ge=1, le=256, description="Not parked ones: a model without requests parks by itself.")
    max_replicas: int = Field(ge=1, le=256)
    target_load: float = Field(default=0.8, gt=0, le=1, description="Above it for up_after_s there is one replica more.")
    up_after_s: float = Field(default=5.0, ge=0)
    down_after_s: float = Field(default=120.0, ge=0, description="One less when that stays well below target_load for so long.")

    @model_validator(mode="after")
    def _check(self) -> ScalingSpec:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must not be below min_replicas")
        return self


class ServerSpec(Strict):
    """How gateways ask a server that runs elsewhere. Keys are named here, never written."""

    key_env: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Variable in the gateways' environment that holds its key."
    )
    key_file: str | None = Field(default=None, description="File on the gateways' nodes that holds its key; read again at once.")
    key_header: HeaderName = Field(default="authorization", description="Where the key goes. authorization: as `Bearer KEY`.")
    ca: str | None = Field(default=None, description="PEM file of the authorities that it is trusted by. Default: the system's.")
    silent_s: float = Field(
        default=60.0,
        gt=0,
        description="With requests in flight and nothing heard for so long it leaves its routes, until it answers a probe.",
    )

    @model_validator(mode="after")
    def _check(self) -> ServerSpec:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("server has key_env and key_file; name one of them")
        return self


class ModelSpec(Strict):
    source: str = Field(
        description="package:NAME (a GGUF or safetensors inside an installed Python package), file:PATH (a .gguf file or a "
        f"Hugging Face directory), or a plain path. Or a server that already runs, which is asked and not managed: {FORMS}."
    )
    tokenizer: str | None = Field(
        default=None,
        description="Of a server that already runs: its tokenizer, as `source` names files. Prompts are then tokenized here, "
        "and it is sent token ids; trtllm+grpc takes nothing else. Absent: it is sent text.",
    )
    server: ServerSpec = Field(default=ServerSpec(), description="Of a server that already runs: how it is asked.")
    engine: Literal["torch", "trtllm"] = "torch"
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "fp8"] = Field(
        default="auto", description="auto: the checkpoint's own (4-bit stays 4-bit)."
    )
    tensor_parallel: int | Literal["auto"] = "auto"
    pipeline_parallel: int | Literal["auto"] = "auto"
    context: int | None = Field(default=None, ge=16, description="Tokens of prompt plus answer. Default: the checkpoint's.")
    replicas: int = Field(default=1, ge=0, le=256, description="Worker groups. 0 keeps the model known but unplaced.")
    scaling: ScalingSpec | None = Field(default=None, description="Replicas by load. Then `replicas` is how many it begins with.")
    pools: tuple[Name, ...] = Field(default=(), description="Pools it may be placed in. Empty: any.")
    priority: int = Field(default=0, ge=-100, le=100)
    residency: Literal["resident", "auto"] = Field(default="auto", description="resident: never parked.")
    keep_warm_s: float = Field(
        default=0.0,
        ge=0,
        description="After its last request it is not parked for so long to make room, except for higher priority.",
    )
    idle_park_s: float | None = Field(
        default=None, gt=0, description="Without requests for so long it is parked. Absent: only where others need its memory."
    )
    idle_unload_s: float | None = Field(
        default=None, gt=0, description="Without requests for so long it keeps nothing but its place: the next one loads it."
    )
    limits: LimitsSpec = LimitsSpec()
    kv: KvSpec = KvSpec()
    canary: CanarySpec = CanarySpec()
    slo: SloSpec | None = None
    load: LoadSpec | None = Field(default=None, description="Expected load; see `yard simulate` for what a trace would need.")
    chat_template: str | None = Field(default=None, description="Jinja template that replaces the checkpoint's own.")

    @property
    def address(self) -> ServerAddress | None:
        """Of a server that runs elsewhere; None of a model that pools hold."""
        return server_address(self.source)

    @property
    def is_managed(self) -> bool:
        return self.address is None

    @property
    def answers_in_text(self) -> bool:
        """Its server sends no token ids."""
        return self.address is not None and self.address.protocol == "openai"

    @property
    def reads_text(self) -> bool:
        """Its server takes prompts as they are written; no tokenizer of it is here."""
        return self.address is not None and self.tokenizer is None

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        address = self.address
        if address is None:
            for name in ("tokenizer", "server"):
                if getattr(self, name) != ModelSpec.model_fields[name].default:
                    raise ValueError(f"{name} is for a source that is a server: {FORMS}; leave it out")
            return self._check_managed()
        return self._check_server(address)

    def _check_server(self, address: ServerAddress) -> ModelSpec:
        """It has no place in a pool, no engine and no memory here, so nothing may be said of them."""
        for name, known in ModelSpec.model_fields.items():
            if name not in _OF_SERVERS and getattr(self, name) != known.default:
                raise ValueError(f"{name} has no meaning for a server that runs elsewhere, which is not managed; leave it out")
        for name, known in LimitsSpec.model_fields.items():
            if name not in ("concurrency", "queue") and getattr(self.limits, name) != known.default:
                raise ValueError(f"limits.{name} has no meaning for a server that runs elsewhere; leave it out")
        if self.replicas > 1:
            raise ValueError("replicas: a server is one replica; make a Model of each server, and a Route with all of them")
        if address.protocol == "trtllm" and self.tokenizer is None:
            raise ValueError("tokenizer: a trtllm+grpc server takes token ids only; name the directory of its tokenizer")
        if self.chat_template is not None and self.tokenizer is None:
            raise ValueError("chat_template: the server uses its own; a template here needs tokenizer")
        if self.server.ca is not None and not address.tls:
            raise ValueError("server.ca: the source is without TLS; write openai+https:// or trtllm+grpcs://, or leave it out")
        return self

    def _check_managed(self) -> ModelSpec:
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ValueError(f"{name} must be 1 or more, or auto")
        if self.kv.ceiling is not None and self.kv.ceiling < self.kv.floor:
            raise ValueError("kv.ceiling must not be below kv.floor")
        if self.residency == "resident" and (self.idle_park_s is not None or self.idle_unload_s is not None):
            raise ValueError("residency: resident is never parked; leave idle_park_s and idle_unload_s out")
        if self.idle_park_s is not None and self.idle_unload_s is not None and self.idle_unload_s < self.idle_park_s:
            raise ValueError("idle_unload_s must not be below idle_park_s")
        return self


_OF_SERVERS = ("source", "tokenizer", "server", "context", "replicas", "priority", "limits", "chat_template")


class TargetSpec(Strict):
    model: Name
    weight: int = Field(default=100, ge=0, le=1_000_000)


class CanaryRouteSpec(Strict):
    """Part of a route's callers get another model. Named callers always do; of the others `percent` in a hundred."""

    model: Name
    percent: float = Field(default=0.0, ge=0, le=100, description="Of the callers that are not named below.")
    tenants: tuple[Name, ...] = Field(default=(), description="Tenants that always get it.")
    headers: dict[HeaderName, str] = Field(default_factory=dict, description="Requests with one of these headers get it.")

    @model_validator(mode="after")
    def _check(self) -> CanaryRouteSpec:
        if not (self.percent or self.tenants or self.headers):
            raise ValueError("a canary needs percent, tenants or headers: else nobody gets it")
        return self


class ShadowSpec(Strict):
    """A copy of part of the requests goes to another model too. Its answer is dropped, callers never wait for it, it counts in
    no quota, and it is left out whenever the model has something else to do."""

    model: Name
    percent: float = Field(default=100.0, gt=0, le=100)
    concurrency: int = Field(default=4, ge=1, le=256, description="Copies at once, per gateway; more are dropped.")


class RouteRuleSpec(Strict):
    """Requests for which all that is given here holds go to `model`."""

    model: Name
    min_prompt_tokens: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    quality: Literal["fast", "precise"] | None = Field(
        default=None, description="What the header or metadata `modelyard-quality` of the request says."
    )

    @model_validator(mode="after")
    def _check(self) -> RouteRuleSpec:
        if self.min_prompt_tokens is None and self.max_prompt_tokens is None and self.quality is None:
            raise ValueError("a rule needs min_prompt_tokens, max_prompt_tokens or quality")
        if (self.min_prompt_tokens or 0) > (self.max_prompt_tokens or float("inf")):
            raise ValueError("min_prompt_tokens is above max_prompt_tokens, so no prompt can fit the rule")
        return self


class ResponseFilterSpec(Strict):
    """A plug-in that may cut or replace text of the route's answers before it leaves."""

    name: str = Field(description="`words`, or an entry point in the group modelyard.response_filters.")
    on_failure: Literal["open", "closed"] = Field(
        description="When it fails or takes too long. open: the text leaves as it is; closed: the answer ends with an error."
    )
    timeout_ms: int = Field(default=50, ge=1, le=60_000, description="For each piece of text.")
    options: tuple[tuple[str, str], ...] = Field(default=(), description="What it is given: pairs of name and value.")


class RouteSpec(Strict):
    """A name that clients ask for. It points to models, never to other routes, so routes cannot form a loop."""

    targets: tuple[TargetSpec, ...] = Field(min_length=1)
    aliases: tuple[Name, ...] = ()
    sticky: HeaderName | None = Field(
        default=None,
        description="`tenant`, or the name of a header: callers with the same one stay with the same target, and on the same "
        "side of a canary. Requests without it are spread at random.",
    )
    canary: CanaryRouteSpec | None = None
    rules: tuple[RouteRuleSpec, ...] = Field(default=(), description="The first that holds decides, before the weights.")
    fallback: tuple[Name, ...] = Field(
        default=(), description="Models that answer, in this order, while what was chosen and every other target cannot."
    )
    shadow: ShadowSpec | None = None
    response_filter: ResponseFilterSpec | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that it names."""
        named = [target.model for target in self.targets]
        named += [rule.model for rule in self.rules] + list(self.fallback)
        named += [part.model for part in (self.canary, self.shadow) if part is not None]
        return tuple(dict.fromkeys(named))

    @model_validator(mode="after")
    def _check(self) -> RouteSpec:
        models = [target.model for target in self.targets]
        if len(set(models)) != len(models):
            raise ValueError("targets name a model twice")
        if not any(target.weight for target in self.targets):
            raise ValueError("at least one target needs a weight above 0")
        if len(set(self.fallback)) != len(self.fallback):
            raise ValueError("fallback names a model twice")
        if self.shadow is not None and self.shadow.model in models:
            raise ValueError(f"shadow.model {self.shadow.model!r} is a target: it would get the same requests twice")
        return self


class PoolSpec(Strict):
    """A set of devices whose memory is one ledger. One placement group, one bundle a device, on one node or several."""

    device: Literal["cpu", "cuda"] = "cpu"
    devices: int = Field(default=1, ge=1, le=1024)
    memory: Bytes | None = Field(default=None, description="Ledger capacity per device. Default: cuda: the card less 1 GiB.")
    engines: tuple[Literal["torch", "trtllm"], ...] = Field(
        default=("torch", "trtllm"),
        min_length=1,
        description="What may compute in it. Without torch no rank process of ours takes memory on its devices.",
    )
    standby: Bytes = Field(
        default=0,
        description="Host memory per device for the weights of parked models. With it the pool takes models beyond the memory of "
        "its devices, as long as this has room; they take turns. 0: every model has device memory of its own.",
    )
    cordoned: tuple[int, ...] = Field(default=(), description="Ranks that take no new models; what is on them moves elsewhere.")
    node_labels: dict[str, str] = Field(default_factory=dict, description="Ray node labels that its nodes must carry.")
    rank_grace_s: float = Field(
        default=60.0,
        ge=1,
        description="A rank that finds no driver for so long frees itself and exits. A change restarts nothing: it takes effect "
        "when the pool's ranks start next.",
    )

    @model_validator(mode="after")
    def _check(self) -> PoolSpec:
        if self.device == "cpu" and self.memory is None:
            raise ValueError("memory is needed for a cpu pool: say how many bytes each rank may hold, for example 2GiB")
        if self.device == "cpu" and "torch" not in self.engines:
            raise ValueError("a cpu pool computes with torch; add it to engines, or use device: cuda")
        if self.memory is None and "torch" not in self.engines:
            raise ValueError("memory is needed for a pool without torch: no rank of ours asks its cards what they have")
        if unknown := [rank for rank in self.cordoned if not 0 <= rank < self.devices]:
            raise ValueError(f"cordoned names rank {unknown[0]}; the pool has ranks 0 to {self.devices - 1}")
        return self


class QuotaSpec(Strict):
    """Over the whole site, however many gateways it has. Unused quota is kept for `burst_s`."""

    requests_per_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0, description="Tokens of prompts and answers together.")
    burst_s: float = Field(default=10.0, gt=0, le=3600)


KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


Role = Literal["infer", "operate", "admin"]


class TenantSpec(Strict):
    """Who asks. Known by an API key, or on sites where no tenant has keys by the header `modelyard-tenant`."""

    key_hashes: tuple[KeyHash, ...] = Field(
        default=(), description="SHA-256 of its API keys, in hexadecimal. Once any tenant has some, every request needs a key."
    )
    role: Role = Field(
        default="infer",
        description="What its keys may do. infer: ask models. operate: also see the site, switch routes, park and wake models. "
        "admin: also apply and delete objects, back up and restore.",
    )
    routes: tuple[Name, ...] = Field(default=(), description="Routes it may ask. Empty: all.")
    weight: int = Field(default=100, ge=1, description="Its share of a model, against that of other tenants that wait for it.")
    priority: int = Field(
        default=0, ge=-100, le=100, description="Of its requests in queues. A request may ask for less by `modelyard-priority`."
    )
    quota: QuotaSpec = QuotaSpec()


class TlsSpec(Strict):
    """Files in PEM, the same paths on every node that runs a gateway; relative ones start at the site directory. They are read
    again when they change, so a renewal needs no restart."""

    cert: str = Field(description="The certificate, with what leads to its authority.")
    key: str = Field(description="Its private key.")
    client_ca: str | None = Field(
        default=None, description="Authorities of client certificates. With it every client must show one (mutual TLS)."
    )
    ca: str | None = Field(default=None, description="What `yard` on this machine trusts. Default: the certificate itself.")
    name: str = Field(default="localhost", description="The name in the certificate that `yard` on this machine looks for.")


class ListenSpec(Strict):
    host: str = "127.0.0.1"
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    http_port: int = Field(default=8000, ge=0, le=65535)
    dashboard_port: int = Field(default=8265, ge=0, le=65535)
    tls: TlsSpec | None = Field(default=None, description="On gRPC and HTTP. Absent: plain text.")
    max_message: Bytes = Field(default=32 * 2**20, ge=2**16, description="Of one gRPC message.")
    max_headers: Bytes = Field(default=64 * 2**10, ge=2**12, description="Of one request: HTTP headers, or gRPC metadata.")
    streams_per_client: int = Field(
        default=4096, ge=1, description="Requests that one client, by its API key or address, may have open at one gateway."
    )


class EngineSpec(Strict):
    """TensorRT-LLM on this site. It pins its own torch and transformers, so it runs in an interpreter of its own."""

    python: str | None = Field(default=None, description="Interpreter of the engine's own environment, the same on all nodes.")
    orchestrator: Literal["mpi", "ray"] = Field(
        default="mpi",
        description="mpi: the library's ranks are MPI processes of its own server. ray: actors in the pool's placement group; "
        "needs Ray and Python of the site's own versions in the engine's environment.",
    )
    launch: Literal["spawn", "mpiexec"] = Field(
        default="spawn",
        description="With mpi. spawn: the library spawns its ranks, on one node. mpiexec: they are launched around its server, "
        "which is what groups over several nodes need.",
    )
    park: Literal["auto", "reload"] = Field(
        default="auto", description="auto: by release and resume where the version can. reload: always by unloading."
    )
    gpu_share: float = Field(
        default=0.03, gt=0, le=0.1, description="With ray: what each of its actors books of a bundle's GPU. Books, not limits."
    )
    start_timeout_s: float = Field(default=1800.0, ge=10, description="From the start of its process until a model is loaded.")
    telemetry: bool = Field(default=False, description="Whether the library may send usage data home.")
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Variables for its processes, such as NCCL_SOCKET_IFNAME. They get few others.",
    )
    artifacts: str | None = Field(
        default=None,
        description="Directory of built engines and quantized checkpoints, on all nodes. Default: the cache.",
    )


class SiteSpec(Strict):
    """Of the installation rather than of the fleet: read from the site directory by `yard up`, not kept in Redis."""

    listen: ListenSpec = ListenSpec()
    gateways: int = Field(default=1, ge=1, le=64)
    redis: str | None = Field(
        default=None, description="redis://, rediss://, redis+sentinel:// or redis+cluster:// URL. Default: embedded."
    )
    quotas_without_redis: Literal["allow", "deny", "last"] = Field(
        default="last",
        description="While Redis is away: allow: quotas do not count; deny: tenants with a quota are refused; last: each gateway "
        "goes on at the rate that it was last given.",
    )
    engines: dict[Literal["trtllm"], EngineSpec] = Field(default_factory=dict)
    internal_tls: bool | None = Field(
        default=None,
        description="Mutual TLS among gateways, controller and pool drivers, with certificates that they make themselves. "
        "Default: only where they do not listen on loopback.",
    )


SPECS: dict[str, type[Strict]] = {
    "Model": ModelSpec,
    "Route": RouteSpec,
    "Pool": PoolSpec,
    "Tenant": TenantSpec,
    "Site": SiteSpec,
}
DESIRED_KINDS = ("Pool", "Model", "Route", "Tenant")


class Metadata(Strict):
    name: Name


class Manifest(Strict):
    """One YAML document. `spec` is already an instance of the kind's own class."""

    apiVersion: Literal["modelyard/v1"]
    kind: Literal["Model", "Route", "Pool", "Tenant", "Site"]
    metadata: Metadata
    spec: Any

    @property
    def name(self) -> str:
        return self.metadata.name

    @model_validator(mode="before")
    @classmethod
    def _parse_spec(cls, data: Any) -> Any:
        if isinstance(data, dict) and str(data.get("kind")) in SPECS and isinstance(data.get("spec"), dict):
            return {**data, "spec": SPECS[data["kind"]].model_validate(data["spec"])}
        return data
