"""What a plan says of TensorRT-LLM models, and in which pools they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.api.config import EngineSpec, ModelSpec, PoolSpec
from gateway.api.proto.admin_pb2 import Placement
from gateway.api.records import PoolRecord, SwitchRecord, TrtllmRecord
from gateway.api.trtllm.features import Features
from gateway.api.trtllm.manifest import Manifest, write_manifest
from gateway.controller.model_requests import AskedModel
from gateway.controller.placing import snapshot_of
from gateway.controller.situation import PoolSight
from gateway.servers.engine_plan import with_engine_notes
from gateway.state.view import ModelEntry, PoolEntry
from placement.types import ModelRequest, ModelShape
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import LocalSeat

NEEDED = ("model", "tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len")
FEATURES = Features(
    "1.4.0rc1",
    arguments=(*NEEDED, "kv_cache_config", "sleep_config"),
    configs={"kv_cache_config": ("max_gpu_total_bytes",)},
    llm=("release", "resume"),
    mpi_session=("wait_shutdown",),
)
OLD = Features("1.2.1", arguments=(*NEEDED, "kv_cache_config"), mpi_session=("wait_shutdown",))


async def noted(checkpoint: Path, tmp_path: Path, features: Features | None, problem: str = "", **spec: Any) -> Placement:
    settings = EngineSpec(python="/opt/python").model_dump_json()
    record = PoolRecord("p", "", "", "", 0, "cuda", 0, 0, 0.0, switches=(SwitchRecord("load", 3, 61.0, 60.0, 62.0),),
                        trtllm=TrtllmRecord(settings, features, problem))  # fmt: skip
    model = ModelSpec.model_validate({"source": f"file:{checkpoint}", "engine": "trtllm", "kv": {"block_tokens": 32}, **spec})
    row = Placement(model="m", pool="p", ranks=[0], action="load")
    [found] = await with_engine_notes([row], {"m": ModelEntry(model, 1)}, {"p": record}, tmp_path)
    return found


async def test_what_the_version_lacks_is_said_before_anything_is_stopped(checkpoint: Path, tmp_path: Path) -> None:
    row = await noted(checkpoint, tmp_path, FEATURES, precision="fp8")
    assert row.action == "none"
    assert "yard engine quantize" in row.reasons[0]
    assert (await noted(checkpoint, tmp_path, FEATURES)).action == "load"
    broken = await noted(checkpoint, tmp_path, None, "TensorRT-LLM cannot be asked what it can do: no libcuda")
    assert (broken.action, broken.reasons) == ("none", ["TensorRT-LLM cannot be asked what it can do: no libcuda"])


async def test_a_plan_refuses_an_artifact_of_another_machine(checkpoint: Path, tmp_path: Path) -> None:
    write_manifest(checkpoint, Manifest("engine", "/models/ckpt", "d", "bf16", trtllm="1.2.1", compute_capability="8.0"))
    row = await noted(checkpoint, tmp_path, FEATURES)
    assert row.action == "none"
    assert "built by TensorRT-LLM 1.2.1, here is 1.4.0rc1" in row.reasons[0]


async def test_a_plan_says_what_a_switch_costs_where_the_version_cannot_park(checkpoint: Path, tmp_path: Path) -> None:
    row = await noted(checkpoint, tmp_path, OLD)
    assert "each switch to it is a load, 60 s" in row.reasons[0]
    assert not (await noted(checkpoint, tmp_path, FEATURES)).reasons


def test_what_a_pool_publishes_of_its_engine_has_no_variables(tmp_path: Path) -> None:
    """Rule 15: they may be secrets."""
    settings = EngineSpec(python="/opt/python", environment={"HF_TOKEN": "hf_secret"})
    record = EngineRuntime(settings, LocalSeat(tmp_path), tmp_path).record()
    assert record is not None
    assert "hf_secret" not in repr(record)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"device": "cpu", "memory": "1GiB", "engines": ["trtllm"]}, "computes with torch"),
        ({"device": "cuda", "engines": ["trtllm"]}, "memory is needed for a pool without torch"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_when_it_is_read(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PoolSpec.model_validate(spec)


def test_a_model_goes_to_pools_that_host_its_engine() -> None:
    shape = ModelShape(
        family="llama", layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocabulary=8, max_context=8,
        tied_embeddings=True, layer_bytes=(1,), embedding_bytes=1, head_bytes=0,
    )  # fmt: skip
    specs = {
        "both": PoolSpec(device="cuda", memory=1),
        "torch": PoolSpec(device="cuda", memory=1, engines=("torch",)),
        "trt": PoolSpec(device="cuda", memory=1, engines=("trtllm",)),
    }
    sights = {name: PoolSight(PoolRecord(name, "", "", "", 0, "cuda", 0, 0, 0.0)) for name in specs}
    entries = {name: PoolEntry(spec, 1) for name, spec in specs.items()}

    def pools(engine: str, named: tuple[str, ...] = ()) -> tuple[str, ...]:
        request = ModelRequest("m", shape, engine=engine, pools=named)
        model = AskedModel(ModelSpec(source="x"), 1, request)
        [placed] = snapshot_of({"m": model}, sights, entries, ()).models
        return placed.pools

    assert pools("trtllm") == ("both", "trt")
    assert pools("torch") == ("both", "torch")
    assert pools("trtllm", ("torch",)) == ("one with trtllm in its engines",)
