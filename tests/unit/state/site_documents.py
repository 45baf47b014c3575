"""Documents as ops write them, for the tests of the state store and the controller."""

from __future__ import annotations

from typing import Any


def model(name: str, **spec: Any) -> dict[str, Any]:
    return _document("Model", name, {"source": f"file:/models/{name}", **spec})


def pool(name: str, **spec: Any) -> dict[str, Any]:
    return _document("Pool", name, {"device": "cpu", "devices": 2, "memory": "2GiB", **spec})


def route(name: str, *targets: str, **spec: Any) -> dict[str, Any]:
    return _document("Route", name, {"targets": [{"model": target} for target in targets], **spec})


def tenant(name: str, **spec: Any) -> dict[str, Any]:
    return _document("Tenant", name, spec)


def _document(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
