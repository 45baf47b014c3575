from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BackupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BackupResponse(_message.Message):
    __slots__ = ("snapshot_json", "revision", "objects")
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    snapshot_json: str
    revision: int
    objects: int
    def __init__(self, snapshot_json: _Optional[str] = ..., revision: _Optional[int] = ..., objects: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("snapshot_json", "discard", "force")
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    snapshot_json: str
    discard: bool
    force: bool
    def __init__(self, snapshot_json: _Optional[str] = ..., discard: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("written", "revision", "skipped")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    written: int
    revision: int
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, written: _Optional[int] = ..., revision: _Optional[int] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class Object(_message.Message):
    __slots__ = ("kind", "name", "generation", "manifest_json")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    generation: int
    manifest_json: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., generation: _Optional[int] = ..., manifest_json: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("objects", "force")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[Object]
    force: bool
    def __init__(self, objects: _Optional[_Iterable[_Union[Object, _Mapping]]] = ..., force: _Optional[bool] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("changes", "revision")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    revision: int
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("kind", "name", "action", "generation", "diff", "notes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    action: str
    generation: int
    diff: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., action: _Optional[str] = ..., generation: _Optional[int] = ..., diff: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("changes", "placements")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("model", "pool", "ranks", "action", "reasons", "path", "bytes", "seconds", "evicts", "risks", "standby")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTS_FIELD_NUMBER: _ClassVar[int]
    RISKS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    model: str
    pool: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    action: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    path: str
    bytes: int
    seconds: float
    evicts: _containers.RepeatedScalarFieldContainer[str]
    risks: _containers.RepeatedScalarFieldContainer[str]
    standby: bool
    def __init__(self, model: _Optional[str] = ..., pool: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., action: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ..., path: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., evicts: _Optional[_Iterable[str]] = ..., risks: _Optional[_Iterable[str]] = ..., standby: _Optional[bool] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("kind", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("objects", "revision")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[Object]
    revision: int
    def __init__(self, objects: _Optional[_Iterable[_Union[Object, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("kind", "name", "force")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    force: bool
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: Change
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("kind", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("object", "observed_json", "reasons")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_JSON_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    object: Object
    observed_json: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, object: _Optional[_Union[Object, _Mapping]] = ..., observed_json: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class SwitchRouteRequest(_message.Message):
    __slots__ = ("route", "to_model", "generation", "force")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TO_MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    route: str
    to_model: str
    generation: int
    force: bool
    def __init__(self, route: _Optional[str] = ..., to_model: _Optional[str] = ..., generation: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class RollbackRouteRequest(_message.Message):
    __slots__ = ("route", "force")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    route: str
    force: bool
    def __init__(self, route: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class SwitchRouteResponse(_message.Message):
    __slots__ = ("change", "committed_unix")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_FIELD_NUMBER: _ClassVar[int]
    change: Change
    committed_unix: float
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., committed_unix: _Optional[float] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "last")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    last: int
    def __init__(self, follow: _Optional[bool] = ..., last: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "time_unix", "kind", "subject", "message", "actor", "detail_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    time_unix: float
    kind: str
    subject: str
    message: str
    actor: str
    detail_json: str
    def __init__(self, id: _Optional[str] = ..., time_unix: _Optional[float] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., message: _Optional[str] = ..., actor: _Optional[str] = ..., detail_json: _Optional[str] = ...) -> None: ...

class SetResidencyRequest(_message.Message):
    __slots__ = ("model", "residency")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    model: str
    residency: str
    def __init__(self, model: _Optional[str] = ..., residency: _Optional[str] = ...) -> None: ...

class SetResidencyResponse(_message.Message):
    __slots__ = ("states",)
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.ScalarMap[str, str]
    def __init__(self, states: _Optional[_Mapping[str, str]] = ...) -> None: ...
