"""How the controller recognises, in Serve's own status, which specification a pool's application was started with."""

from __future__ import annotations

import hashlib

from gateway.api.config import PoolSpec

_PREFIX = "driver-"
# What the driver does not look at, and how long its ranks wait for one: it need not start anew for them.
_WITHOUT_RESTART = frozenset({"standby", "cordoned", "rank_grace_s"})
AT_NEXT_START = frozenset({"rank_grace_s"})
"""Fields whose change restarts nothing, and takes effect when the pool's ranks start next."""


def deployment_name(spec: PoolSpec) -> str:
    """Name of the driver's deployment: carries a digest of the specification, so that Serve itself remembers it."""
    return _PREFIX + hashlib.sha256(spec.model_dump_json(exclude=set(_WITHOUT_RESTART)).encode()).hexdigest()[:8]


def changed_fields(before: PoolSpec, after: PoolSpec) -> tuple[str, ...]:
    return tuple(name for name in PoolSpec.model_fields if getattr(before, name) != getattr(after, name))


def restart_fields(before: PoolSpec, after: PoolSpec) -> tuple[str, ...]:
    """The changed fields for which the pool starts anew. Empty: it goes on as it is."""
    return tuple(name for name in changed_fields(before, after) if name not in _WITHOUT_RESTART)


def is_deployment_name(name: str) -> bool:
    return name.startswith(_PREFIX)


def runs(deployment: str, spec: PoolSpec) -> bool:
    """Whether an application with this deployment runs with the specification. Serve may not list it yet: then it may."""
    return deployment in ("", deployment_name(spec))
