"""Asking pool drivers to park, wake or unload a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError, not_found
from gateway.api.pool_channel import pool_channel
from gateway.api.proto.pool_pb2 import SetResidencyRequest
from gateway.api.proto.pool_pb2_grpc import PoolControlStub
from gateway.api.records import PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY
from gateway.state.edits import parse_document
from gateway.state.snapshot import ObjectKey, Snapshot

CALL_S = 3.0

_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorCode.CONFLICT,
    grpc.StatusCode.ABORTED: ErrorCode.CONFLICT,
}


def refuse_unmanaged(snapshot: Snapshot, model: str) -> None:
    stored = snapshot.objects.get(ObjectKey("Model", model))
    spec = parse_document(stored.manifest).spec if stored is not None else None
    if isinstance(spec, ModelSpec) and not spec.is_managed:
        raise YardError(ErrorCode.CONFLICT, f"model `{model}` is a server that runs elsewhere: nothing of it is in memory here")


async def set_residency(pools: Iterable[PoolRecord], secret: str, model: str, residency: str) -> dict[str, str]:
    """State by pool, on its way there, of every pool that holds the model. YardError names the pool that refused."""
    holding = [pool for pool in pools if any(group.model == model for group in pool.groups)]
    if not holding:
        raise not_found(f"model `{model}` is in no pool now; `yard describe model {model}` says why")
    states = await asyncio.gather(*(_ask(pool, secret, model, residency) for pool in holding))
    return {pool.pool: state for pool, state in zip(holding, states, strict=True)}


async def _ask(pool: PoolRecord, secret: str, model: str, residency: str) -> str:
    async with pool_channel(pool.endpoint, secret) as channel:
        request = SetResidencyRequest(model=model, residency=residency)
        try:
            answer = await PoolControlStub(channel).SetResidency(
                request, timeout=CALL_S, metadata=((SECRET_METADATA_KEY, secret),)
            )
        except grpc.aio.AioRpcError as error:
            code = _CODES.get(error.code(), ErrorCode.UNAVAILABLE)
            raise YardError(code, f"pool `{pool.pool}`: {error.details()}") from error
    return answer.residency
