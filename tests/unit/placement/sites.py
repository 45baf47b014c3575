"""Small sites for placement tests: models of round sizes, nodes of like devices."""

from __future__ import annotations

from typing import Any

from placement.types import Device, ModelRequest, ModelShape

GIB = 2**30


def model(name: str, gib: float, **request: Any) -> ModelRequest:
    """A model that takes about `gib` on one rank: weights, and little beside them."""
    layers = 32
    shape = ModelShape(
        family="llama",
        layers=layers,
        hidden=64,
        heads=32,
        kv_heads=8,
        head_dim=2,
        intermediate=256,
        vocabulary=64,
        max_context=64,
        tied_embeddings=False,
        layer_bytes=(int(gib * GIB) // layers,) * layers,
        embedding_bytes=0,
        head_bytes=0,
    )
    return ModelRequest(name, shape, **{"context": 64, "concurrency": 1, **request})


def node(pool: str, name: str, devices: int, gib: float, first_rank: int = 0, **fields: Any) -> tuple[Device, ...]:
    return tuple(
        Device(pool, first_rank + index, name, **{"kind": "cuda", "capacity_bytes": int(gib * GIB), **fields})
        for index in range(devices)
    )
