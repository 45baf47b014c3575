from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UpFrame(_message.Message):
    __slots__ = ("gateway", "submits", "cancels")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, gateway: _Optional[str] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "model", "prompt_ids", "max_tokens", "sampling", "stop_token_ids", "ignore_eos", "timeout_ms", "tenant", "priority", "request_id", "traceparent", "shadow", "tenant_weight")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    id: int
    model: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    timeout_ms: int
    tenant: str
    priority: int
    request_id: str
    traceparent: str
    shadow: bool
    tenant_weight: int
    def __init__(self, id: _Optional[int] = ..., model: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., shadow: _Optional[bool] = ..., tenant_weight: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs", "json_schema")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int
    json_schema: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ...) -> None: ...

class DownFrame(_message.Message):
    __slots__ = ("step", "tokens", "ends", "holds", "loads")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    ends: _containers.RepeatedCompositeFieldContainer[End]
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    loads: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ..., holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("id", "ids", "logprobs", "embedding")
    ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    id: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    embedding: bytes
    def __init__(self, id: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("logprob", "alternative_ids", "alternative_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    alternative_ids: _containers.RepeatedScalarFieldContainer[int]
    alternative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., alternative_ids: _Optional[_Iterable[int]] = ..., alternative_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("id", "finish_reason", "stop_token_id", "error_code", "error_message", "retry_after_ms", "prompt_tokens", "completion_tokens", "cached_tokens", "error_field")
    ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    id: int
    finish_reason: str
    stop_token_id: int
    error_code: str
    error_message: str
    retry_after_ms: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error_field: str
    def __init__(self, id: _Optional[int] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., error_field: _Optional[str] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("id", "reason", "estimated_wait_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    id: int
    reason: str
    estimated_wait_ms: int
    def __init__(self, id: _Optional[int] = ..., reason: _Optional[str] = ..., estimated_wait_ms: _Optional[int] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "outstanding_tokens", "running", "waiting")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    model: str
    outstanding_tokens: int
    running: int
    waiting: int
    def __init__(self, model: _Optional[str] = ..., outstanding_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("fence", "revision", "assignments")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    revision: int
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    def __init__(self, fence: _Optional[int] = ..., revision: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("model", "generation", "spec_json", "groups")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: int
    spec_json: str
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[int] = ..., spec_json: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("ranks", "tensor_parallel", "pipeline_parallel", "measured_json")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    MEASURED_JSON_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    tensor_parallel: int
    pipeline_parallel: int
    measured_json: str
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., measured_json: _Optional[str] = ...) -> None: ...

class AssignResponse(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class DescribePoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribePoolResponse(_message.Message):
    __slots__ = ("pool_json",)
    POOL_JSON_FIELD_NUMBER: _ClassVar[int]
    pool_json: str
    def __init__(self, pool_json: _Optional[str] = ...) -> None: ...

class SetResidencyRequest(_message.Message):
    __slots__ = ("fence", "model", "residency")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    fence: int
    model: str
    residency: str
    def __init__(self, fence: _Optional[int] = ..., model: _Optional[str] = ..., residency: _Optional[str] = ...) -> None: ...

class SetResidencyResponse(_message.Message):
    __slots__ = ("residency",)
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    residency: str
    def __init__(self, residency: _Optional[str] = ...) -> None: ...
