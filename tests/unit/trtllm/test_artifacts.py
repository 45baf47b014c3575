"""Quantized checkpoints and engines: what they are made of, kept by, and refused for. The tools are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import EngineSpec, ModelSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.trtllm.features import Features
from gateway.api.trtllm.manifest import Manifest, mismatches, read_manifest, refuse_misfit, write_manifest
from gateway.artifacts.calibration import CalibrationSet, read_calibration
from gateway.artifacts.making import build, quantize
from gateway.artifacts.store import ArtifactStore
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import LocalSeat
from workers.messages import LoadShard

HERE = Features("1.2.1", cuda="13.1", compute_capability="9.0", commands=("trtllm-build",))
LIMITS = {"max_batch_size": 8, "max_num_tokens": 2048, "max_seq_len": 4096}


def prompts(count: int = 1000) -> list[str]:
    return [f"prompt {number} " + "word " * (number % 50) for number in range(count)]


def calibration(path: Path, lines: list[str]) -> CalibrationSet:
    path.write_text("\n".join(lines))
    return read_calibration(path)


def test_a_good_calibration_set_is_known_by_its_prompts(tmp_path: Path) -> None:
    plain = calibration(tmp_path / "plain.txt", prompts())
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts()]
    assert len(plain.prompts) == 1000
    assert calibration(tmp_path / "set.jsonl", lines).digest == plain.digest
    assert calibration(tmp_path / "other.txt", [*prompts(), "one more"]).digest != plain.digest


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (prompts(999), "999 prompts, at least 1000"),
        (prompts(900) + ["the same"] * 100, "duplicates"),
        ([f"{number:06}" for number in range(1000)], "of one length"),
    ],
)
def test_a_bad_calibration_set_is_refused(tmp_path: Path, lines: list[str], problem: str) -> None:
    with pytest.raises(YardError, match=problem):
        calibration(tmp_path / "set.txt", lines)


def test_a_calibration_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(YardError, match=r"prompts\.jsonl: no such file or directory") as refused:
        read_calibration(tmp_path / "prompts.jsonl")
    assert refused.value.code is ErrorCode.INVALID


def test_an_artifact_is_made_once_and_again_when_an_input_changes(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    manifest = Manifest("quantized", "file:/a", "digest", "FP8", calibration_digest="c1")
    made: list[Path] = []
    first, now = store.get(manifest, made.append)
    assert now
    assert read_manifest(first) == manifest
    assert store.get(msgspec.structs.replace(manifest, source="file:/moved"), made.append) == (first, False)
    for change in ({"source_digest": "other"}, {"calibration_digest": "c2"}, {"precision": "W4A16_AWQ"}, {"limits": {"a": 1}}):
        other, now = store.get(msgspec.structs.replace(manifest, **change), made.append)
        assert now
        assert other != first


def test_what_fails_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    manifest = Manifest("quantized", "file:/a", "digest", "FP8")

    def fail(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise YardError("internal", "no more disk")  # type: ignore[arg-type]

    with pytest.raises(YardError):
        store.get(manifest, fail)
    assert store.find(manifest) is None
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_an_engine_of_another_machine_is_refused_with_what_differs_and_the_way_out(tmp_path: Path) -> None:
    elsewhere = {"trtllm": "1.2.0", "cuda": "12.9", "compute_capability": "8.0", "tensor_parallel": 2}
    engine = Manifest("engine", "/models/ckpt", "d", "FP8", limits=LIMITS, **elsewhere)
    assert len(mismatches(engine, HERE, (1, 1))) == 4
    assert len(mismatches(engine, HERE)) == 3
    write_manifest(tmp_path, engine)
    with pytest.raises(YardError, match=r"capability 8.0, here is 9.0.*yard engine build /models/ckpt --tensor-parallel 1"):
        refuse_misfit("m", tmp_path, HERE, (1, 1))
    with pytest.raises(YardError, match="this version builds none: give the original"):
        refuse_misfit("m", tmp_path, Features("1.4.0rc1", compute_capability="9.0"))
    fits = msgspec.structs.replace(engine, trtllm="1.2.1", cuda="13.1", compute_capability="9.0", tensor_parallel=1)
    assert mismatches(fits, HERE, (1, 1)) == []


async def test_a_pool_refuses_an_artifact_that_its_gpus_cannot_compute(
    tmp_path: Path, environment: Callable[..., Path], checkpoint: Path
) -> None:
    """By what the installed version says of itself and its GPU, before anything is stopped or reserved for it."""
    runtime = EngineRuntime(EngineSpec(python=str(environment("1.4.0rc1", import_s=0))), LocalSeat(tmp_path), tmp_path)
    spec = ModelSpec.model_validate({"source": f"file:{checkpoint}", "engine": "trtllm", "kv": {"block_tokens": 32}})
    write_manifest(checkpoint, Manifest("quantized", "file:/models/a", "d", "FP8"))
    await runtime.check("m", spec)
    write_manifest(checkpoint, Manifest("quantized", "file:/models/a", "d", "NVFP4"))
    found = r"NVFP4 needs compute capability 10.0, here is 9.0.*yard engine quantize file:/models/a --format W4A16_AWQ"
    with pytest.raises(YardError, match=found):
        await runtime.check("m", spec)
    load = LoadShard(
        op=1, group_id=1, model="m", spec_json=spec.model_dump_json(), ranks=(0,), tensor_parallel=1, pipeline_parallel=1,
        budget={"kv_floor": 2**20}, kv_floor_blocks=1, kv_ceiling_blocks=4, kv_block_tokens=32,
    )  # fmt: skip
    with pytest.raises(YardError, match=found):
        await runtime.arguments_for(load, spec, await runtime.seat.place((0,)))


def test_quantize_writes_a_checkpoint_that_is_recognised(
    tmp_path: Path, environment: Callable[..., Path], checkpoint: Path
) -> None:
    python = environment("1.4.0rc1")
    chosen = CalibrationSet(("some text", "another one"), "c", 0, 3.0)
    said: list[str] = []

    def make(kv: str) -> tuple[Path, bool]:
        return quantize(
            ArtifactStore(tmp_path / "store"), str(python), Features("1.4.0rc1"), f"file:{checkpoint}", tmp_path / "cache",
            chosen, "FP8", kv, lambda _fraction, what: said.append(what),
        )  # fmt: skip

    directory, now = make("FP8")
    assert now
    made = open_checkpoint(f"file:{directory}", tmp_path / "cache")
    assert (made.quantization, made.kv_quantization, made.precision) == ("FP8", "FP8", "fp8")
    assert "calibrating: 2 of 2 prompts" in said
    assert make("FP8") == (directory, False)
    with pytest.raises(YardError, match="give the original"):
        quantize(ArtifactStore(tmp_path), str(python), HERE, f"file:{directory}", tmp_path, chosen, "FP8", "", lambda *_: None)


def test_build_makes_an_engine_for_each_rank_in_1_2_only(tmp_path: Path, environment: Callable[..., Path]) -> None:
    python = environment("1.2.1")
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "config.json").write_text(json.dumps({"architecture": "LlamaForCausalLM", "mapping": {"world_size": 2}}))

    def make(features: Features) -> Path:
        return build(
            ArtifactStore(tmp_path / "store"), str(python), features, str(converted), "d", converted, "bf16", (2, 1),
            LIMITS, lambda *_: None,
        )[0]  # fmt: skip

    directory = make(HERE)
    assert {path.name for path in directory.glob("*.engine")} == {"rank0.engine", "rank1.engine"}
    manifest = read_manifest(directory)
    assert manifest is not None
    assert (manifest.compute_capability, manifest.tensor_parallel, manifest.limits) == ("9.0", 2, LIMITS)
    with pytest.raises(YardError, match="builds no engines"):
        make(Features("1.4.0rc1"))
