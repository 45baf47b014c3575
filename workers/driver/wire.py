"""Between the messages of pool.proto and the driver's own values."""

from __future__ import annotations

import msgspec
from pydantic import ValidationError

from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from gateway.api.proto import pool_pb2
from placement.types import Measured
from workers.driver.group import Wanted
from workers.driver.sequence import Request
from workers.driver.sizing import Placement
from workers.messages import Sampling


def request_of(link: int, submit: pool_pb2.Submit, now: float) -> Request:
    sampling = submit.sampling
    return Request(
        key=(link, submit.id),
        model=submit.model,
        prompt=tuple(submit.prompt_ids),
        max_tokens=submit.max_tokens,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logprobs=sampling.logprobs,
            json_schema=sampling.json_schema,
        ),
        stop_token_ids=frozenset(submit.stop_token_ids),
        ignore_eos=submit.ignore_eos,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        priority=submit.priority,
        request_id=submit.request_id,
        traceparent=submit.traceparent,
        tenant=submit.tenant,
        tenant_weight=submit.tenant_weight or 100,
        shadow=submit.shadow,
    )


def wanted_of(assignment: pool_pb2.Assignment) -> list[Wanted]:
    """One entry a worker group. YardError(INVALID) when the spec is not one."""
    try:
        spec = ModelSpec.model_validate_json(assignment.spec_json)
    except ValidationError as error:
        raise invalid(
            f"model `{assignment.model}`: spec_json is no ModelSpec: {error.errors()[0]['msg']}", field="spec_json"
        ) from error
    return [
        Wanted(
            model=assignment.model,
            generation=assignment.generation,
            spec=spec,
            spec_json=assignment.spec_json,
            placement=Placement(tuple(group.ranks), group.tensor_parallel, group.pipeline_parallel),
            measured=_measured(assignment.model, group.measured_json),
        )
        for group in assignment.groups
    ]


def _measured(model: str, text: str) -> Measured | None:
    try:
        return msgspec.json.decode(text, type=Measured) if text else None
    except msgspec.MsgspecError as error:
        raise invalid(f"model `{model}`: measured_json is no Measured: {error}", field="measured_json") from error
