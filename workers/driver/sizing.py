"""From a model's facts and spec to bytes and blocks on each rank of a worker group. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from placement.footprint import group_footprint
from placement.split import pipeline_parallel_problem, tensor_parallel_problem
from placement.types import Measured, ModelRequest
from workers.driver.effects import ModelFacts
from workers.memory.arena import HOST_PAGE_BYTES
from workers.memory.kv_layout import block_bytes, blocks_for_tokens, stage_layers

PAGE_BYTES = {"cpu": HOST_PAGE_BYTES, "cuda": 32 * 2**20}
"""What an arena maps at once: see `workers.memory.arena` and `workers.memory.cuda_arena`."""

KV_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""KV grows and shrinks by so much on the rank with the largest blocks."""

# An engine keeps more than the matrices (norms, tables, padding, a head in two forms): the slack of `placement.footprint` is room
# for that until the load has been measured, and this is the workspace's part of it. A load that failed may have lacked room, so
# the next attempt gets more.
_SLACK_BYTES = 6 * HOST_PAGE_BYTES
_SLACK_SHARE = 0.1
_MORE_AN_ATTEMPT = 0.25


@dataclass(frozen=True)
class Placement:
    """Ranks stage-major: ranks[stage * tensor_parallel + shard]."""

    ranks: tuple[int, ...]
    tensor_parallel: int
    pipeline_parallel: int

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        return f"ranks {ranks} (tensor {self.tensor_parallel} × pipeline {self.pipeline_parallel})"


@dataclass(frozen=True)
class GroupSizing:
    block_bytes: dict[int, int]  # by rank
    block_tokens: int
    floor_blocks: int
    ceiling_blocks: int
    chunk_blocks: int
    page_bytes: int
    context: int
    budget: dict[int, dict[str, int]]  # by rank: kind -> bytes, with kv_floor

    def kv_bytes(self, blocks: int) -> dict[int, int]:
        """Bytes by rank that `blocks` blocks take, in whole pages."""
        return {rank: pages(blocks * size, self.page_bytes) for rank, size in self.block_bytes.items()}

    def kv_used_bytes(self, blocks: int) -> dict[int, int]:
        """What of it lies above the floor."""
        floor = self.kv_bytes(self.floor_blocks)
        return {rank: max(0, size - floor[rank]) for rank, size in self.kv_bytes(blocks).items()}


def size_group(
    model: str,
    spec: ModelSpec,
    facts: ModelFacts,
    placement: Placement,
    device: str,
    failed_attempts: int = 0,
    measured: Measured | None = None,
) -> GroupSizing:
    """By what was `measured` of earlier loads, else by estimates: as the model was placed. After a failed load by the larger.

    YardError(INVALID) when the model cannot be divided this way, or its KV limits do not hold one token block."""
    # Keys and values are as wide as the activations that they come from.
    shape = replace(facts.shape, kv_bytes_per_element=4 if facts.precision == "fp32" else 2)
    tensor, stages = placement.tensor_parallel, placement.pipeline_parallel
    problem = tensor_parallel_problem(shape, tensor) or pipeline_parallel_problem(shape, stages)
    if problem:
        raise invalid(f"model `{model}` cannot be {placement}: {problem}")
    context = min(spec.context or facts.max_context, facts.max_context)
    request = ModelRequest(
        name=model,
        shape=shape,
        context=context,
        concurrency=spec.limits.concurrency,
        kv_floor_bytes=spec.kv.floor,
        kv_ceiling_bytes=spec.kv.ceiling,
        kv_block_tokens=spec.kv.block_tokens,
        precision=spec.precision,
        engine=spec.engine,
        batch_tokens=spec.limits.batch_tokens,
    )
    footprints = group_footprint(request, tensor, stages, device)
    if measured is not None:
        seen = group_footprint(replace(request, measured=(replace(measured, type=""),)), tensor, stages, device)
        pairs = zip(seen, footprints, strict=True)
        footprints = tuple(max(pair, key=attrgetter("total")) for pair in pairs) if failed_attempts else seen
    tokens = spec.kv.block_tokens
    stage_of = {rank: index // tensor for index, rank in enumerate(placement.ranks)}
    sizes = {
        rank: block_bytes(shape, len(stage_layers(shape.layers, stages, stage)), tensor, tokens)
        for rank, stage in stage_of.items()
    }
    floor_blocks = max(-(-footprints[stage].kv_floor // sizes[rank]) for rank, stage in stage_of.items())
    wanted = spec.limits.concurrency * blocks_for_tokens(context, tokens)
    if spec.kv.ceiling is not None:
        wanted = min(spec.kv.ceiling // size for size in sizes.values())
        if wanted < 2:
            raise invalid(
                f"model `{model}`: kv.ceiling of {spec.kv.ceiling} bytes holds {wanted} blocks; raise it", field="kv.ceiling"
            )
        floor_blocks = min(floor_blocks, wanted)
    if spec.engine == "trtllm":
        wanted = floor_blocks  # told in bytes when it is constructed, and fixed from then on
    more = _MORE_AN_ATTEMPT * failed_attempts
    page = PAGE_BYTES[device]
    budget = {}
    for rank, stage in stage_of.items():
        footprint = footprints[stage]
        workspace = footprint.workspace + footprint.graphs
        room = workspace if footprint.measured else int(workspace * (1 + _SLACK_SHARE)) + _SLACK_BYTES
        parts = {
            "kv_floor": pages(floor_blocks * sizes[rank], page),
            "workspace": pages(room, page),
            "communication": pages(footprint.communication, page),
        }
        # Weights get what is left of what was planned: at first a load takes no byte more or less than the plan says.
        weights = footprint.total - sum(parts.values()) + pages(int(footprint.weights * more), page)
        parts["workspace"] += pages(int(workspace * more), page)
        budget[rank] = {"weights": weights, **parts}
    return GroupSizing(
        block_bytes=sizes,
        block_tokens=tokens,
        floor_blocks=floor_blocks,
        ceiling_blocks=max(wanted, floor_blocks),
        chunk_blocks=max(1, KV_CHUNK_BYTES[device] // max(sizes.values())),
        page_bytes=page,
        context=context,
        budget=budget,
    )


def pages(size_bytes: int, page_bytes: int = HOST_PAGE_BYTES) -> int:
    """Rounded up to whole pages."""
    return -(-size_bytes // page_bytes) * page_bytes
