"""How the controller recognises, in Serve's own status, which specification a pool's application was started with."""

from __future__ import annotations

import hashlib

from gateway.api.config import PoolSpec

_PREFIX = "driver-"
_PLACEMENT_ONLY = {"standby", "cordoned"}  # what the driver does not look at: it need not start anew for them


def deployment_name(spec: PoolSpec) -> str:
    """Name of the driver's deployment: carries a digest of the specification, so that Serve itself remembers it."""
    return _PREFIX + hashlib.sha256(spec.model_dump_json(exclude=_PLACEMENT_ONLY).encode()).hexdigest()[:8]


def is_deployment_name(name: str) -> bool:
    return name.startswith(_PREFIX)


def runs(deployment: str, spec: PoolSpec) -> bool:
    """Whether an application with this deployment runs with the specification. Serve may not list it yet: then it may."""
    return deployment in ("", deployment_name(spec))
