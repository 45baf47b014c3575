"""What Triton's clients read about a model: its tensors, its configuration, its state and its statistics."""

from __future__ import annotations

from gateway.api.proto import kserve_pb2 as pb
from gateway.api.records import GroupRecord
from gateway.servers.kserve_request import INPUTS, OUTPUTS, VERSION
from gateway.servers.tally import Tally

PLATFORM = "modelyard"
_DATA_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "INT32": pb.TYPE_INT32,
    "UINT64": pb.TYPE_UINT64,
    "FP32": pb.TYPE_FP32,
    "BOOL": pb.TYPE_BOOL,
}
_LOADING = ("loading", "checking", "waiting")
_NS = 10**9


def metadata(name: str) -> pb.ModelMetadataResponse:
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=given.name, datatype=given.datatype, shape=given.shape) for given in INPUTS],
        outputs=[tensor(name=output, datatype=datatype, shape=[-1]) for output, datatype in OUTPUTS],
    )


def config(name: str, *, max_context: int, models: list[str]) -> pb.ModelConfigResponse:
    """Decoupled: a request may have several responses. Batches are made by the engines, so there is no dimension for them."""
    parameters = {"max_context": str(max_context), "models": ",".join(models)}
    return pb.ModelConfigResponse(
        config=pb.ModelConfig(
            name=name,
            platform=PLATFORM,
            backend=PLATFORM,
            input=[
                pb.ModelInput(name=given.name, data_type=_DATA_TYPES[given.datatype], dims=given.shape, optional=True)
                for given in INPUTS
            ],
            output=[pb.ModelOutput(name=output, data_type=_DATA_TYPES[datatype], dims=[-1]) for output, datatype in OUTPUTS],
            parameters={key: pb.ModelParameter(string_value=value) for key, value in parameters.items()},
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
    )


def state(groups: list[GroupRecord], unplaced: tuple[str, ...]) -> tuple[str, str]:
    """As Triton's repository index says it, and why it is not READY."""
    if any(group.state == "ready" for group in groups):
        return "READY", ""
    if any(group.state in _LOADING for group in groups):
        return "LOADING", ", ".join(f"{group.state} {group.reason}".strip() for group in groups)
    if any(group.state == "parked" for group in groups):
        return "UNAVAILABLE", "parked: the next request wakes it"
    if any(group.state == "draining" for group in groups):
        return "UNLOADING", "finishes its requests"
    if groups:
        return "UNAVAILABLE", ", ".join(f"{group.state}: {group.reason}" for group in groups)
    return "UNAVAILABLE", "; ".join(unplaced) or "in no pool"


def statistics(model: str, tally: Tally) -> pb.ModelStatistics:
    """`compute_input` is until the first text and has the wait in queues in it, which nothing here tells apart."""

    def duration(count: int, seconds: float) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=count, ns=round(seconds * _NS))

    return pb.ModelStatistics(
        name=model,
        version=VERSION,
        last_inference=round(tally.last_unix * 1000),
        inference_count=tally.answered,
        execution_count=tally.answered,
        inference_stats=pb.InferStatistics(
            success=duration(tally.answered, tally.answered_s),
            fail=duration(tally.failed, tally.failed_s),
            queue=duration(0, 0.0),
            compute_input=duration(tally.answered, tally.first_text_s),
            compute_infer=duration(tally.answered, tally.answered_s - tally.first_text_s),
            compute_output=duration(0, 0.0),
        ),
    )
