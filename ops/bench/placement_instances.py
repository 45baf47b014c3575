"""Seeded sites to place: GPUs of one or several sizes on nodes of 1 to 8, models of the usual sizes, some of them wide."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from placement.footprint import group_footprint
from placement.packing import place
from placement.types import Device, ModelRequest, ModelShape, Snapshot

GIB = 2**30
GPU_GIB = (24, 40, 80, 141)
MODEL_GIB = (0.5, 1, 1.5, 3, 7, 8, 13, 14, 16, 27, 30, 34, 60, 70, 140)
_USABLE = 0.9


def plain_model(name: str, gib: float, **request: object) -> ModelRequest:
    """So many GiB of weights, which divide evenly, and a short context."""
    layers = 32
    shape = ModelShape(
        family="llama", layers=layers, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=32000,
        max_context=2048, tied_embeddings=False, layer_bytes=(int(gib * GIB) // layers,) * layers, embedding_bytes=0,
        head_bytes=0,
    )  # fmt: skip
    return ModelRequest(name, shape, engine="trtllm", context=2048, **request)  # type: ignore[arg-type]


def random_site(seed: int) -> Snapshot:
    """1-64 GPUs and up to 200 models that take 40-95 % of them, degrees given; odd seeds have models of 2-3 replicas among
    them. It may be that not all of them can be placed.
    """
    draw = random.Random(seed)
    more = random.Random(f"replicas of {seed}")
    devices = _nodes(draw, draw.randint(1, 64), mixed=draw.random() < 0.3)
    largest = max(device.capacity_bytes for device in devices) * _USABLE
    widest = max(Counter(device.node for device in devices).values())
    room = sum(device.capacity_bytes for device in devices) * draw.uniform(0.4, 0.95)
    models = []
    for index in range(draw.randint(5, 200)):
        gib = draw.choice(MODEL_GIB) * draw.uniform(0.5, 1.3)
        degree = 1
        while _rank_bytes(gib, degree) > largest and degree < 8:
            degree *= 2
        if draw.random() < 0.2 and degree < 8:
            degree *= 2
        taken = _rank_bytes(gib, degree)
        if degree > widest or taken > largest or taken * degree > room:
            continue
        replicas = more.choice((1, 1, 1, 2, 3)) if seed % 2 else 1
        if replicas * degree > len(devices) or taken * degree * replicas > room:
            replicas = 1
        room -= taken * degree * replicas
        models.append(plain_model(f"m{index}", gib, replicas=replicas, tensor_parallel=degree, pipeline_parallel=1))
    return Snapshot(devices, tuple(models))


def large_site(gpus: int, models: int, seed: int = 0) -> Snapshot:
    """Nodes of 8 in pools of 32; models choose their degrees."""
    draw = random.Random(seed)
    devices: list[Device] = []
    for node in range(gpus // 8):
        size = draw.choice((24, 80, 80, 141))
        devices += [Device(f"p{node // 4}", node % 4 * 8 + index, f"n{node}", "cuda", size * GIB) for index in range(8)]
    sizes = (3, 7, 8, 14, 16, 27, 30, 34, 60, 70, 140)
    requests = [plain_model(f"m{index}", draw.choice(sizes) * draw.uniform(0.8, 1.2)) for index in range(models)]
    return Snapshot(tuple(devices), tuple(requests))


def _nodes(draw: random.Random, gpus: int, *, mixed: bool) -> tuple[Device, ...]:
    size = draw.choice(GPU_GIB)
    devices: list[Device] = []
    while len(devices) < gpus:
        count = min(gpus - len(devices), draw.choice((1, 2, 4, 8, 8, 8)))
        gib = draw.choice(GPU_GIB) if mixed else size
        first = len(devices)
        devices += [Device("p", first + index, f"n{first}", "cuda", gib * GIB) for index in range(count)]
    return tuple(devices)


def _rank_bytes(gib: float, degree: int) -> int:
    return group_footprint(plain_model("m", gib), degree, 1, "cuda")[0].total


def fragmented_site(seed: int) -> tuple[Snapshot, ModelRequest, int]:
    """A site of 16-64 GPUs after models came and went, and a model that wants an island of 4 or 8 of them."""
    draw = random.Random(seed)
    nodes = draw.randint(2, 8)
    devices = tuple(Device("p", node * 8 + index, f"n{node}", "cuda", 80 * GIB) for node in range(nodes) for index in range(8))
    models = tuple(
        plain_model(
            f"m{index}", draw.choice((7, 14, 16, 30, 34, 60)), tensor_parallel=draw.choice((1, 1, 1, 2, 4)), pipeline_parallel=1
        )
        for index in range(nodes * 16)
    )
    placed = place(Snapshot(devices, models)).groups
    names = {group.model for group in placed}
    gone = set(draw.sample(sorted(names), int(len(names) * draw.uniform(0.15, 0.4))))
    left = tuple(replace(model, pinned=draw.random() < 0.1) for model in models if model.name in names - gone)
    groups = tuple(group for group in placed if group.model not in gone)
    degree = draw.choice((4, 8))
    return Snapshot(devices, left, groups), plain_model("wide", 55 * degree, tensor_parallel=degree, pipeline_parallel=1), degree
