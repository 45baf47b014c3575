"""Makes artifacts with the tools of TensorRT-LLM's environment: ModelOpt for checkpoints, `trtllm-build` for engines of 1.2."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint
from gateway.api.errors import invalid, unavailable
from gateway.api.trtllm.features import Features
from gateway.api.trtllm.manifest import Manifest
from gateway.artifacts import run_quantize
from gateway.artifacts.calibration import CalibrationSet
from gateway.artifacts.store import ArtifactStore

Progress = Callable[[float, str], None]

FORMATS = tuple(run_quantize.CONFIGURATIONS)
_TAIL_LINES = 15
_PASSED = ("HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HF_HOME")


def quantize(
    store: ArtifactStore,
    python: str,
    features: Features,
    source: str,
    cache_dir: Path,
    calibration: CalibrationSet,
    algorithm: str,
    kv: str,
    progress: Progress,
    max_tokens: int = 2048,
) -> tuple[Path, bool]:
    """(the checkpoint's directory, whether it was made now). YardError when the format is not of this version, or it fails."""
    if algorithm not in FORMATS:
        raise invalid(f"format {algorithm!r} is none of {', '.join(FORMATS)}")
    if algorithm.startswith("W8A8_SQ") and features.release > (1, 2):
        raise invalid(f"TensorRT-LLM {features.version} cannot run {algorithm}, only 1.2 can; use FP8 or W4A16_AWQ")
    checkpoint = open_checkpoint(source, cache_dir)
    if checkpoint.format != "safetensors" or checkpoint.quantization:
        what = checkpoint.quantization or checkpoint.format
        raise invalid(f"{checkpoint.path} is {what}; give the original Hugging Face directory", field="source")
    manifest = Manifest(
        kind="quantized",
        source=source,
        source_digest=checkpoint.digest,
        precision=algorithm,
        kv_precision=kv,
        modelopt=features.modelopt,
        calibration_digest=calibration.digest,
    )

    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            prompts = Path(scratch) / "prompts"
            prompts.write_text("\n".join(json.dumps(prompt) for prompt in calibration.prompts))
            config = Path(scratch) / "config.json"
            content = {"source": str(checkpoint.path), "output": str(directory), "prompts": str(prompts)}
            config.write_text(json.dumps({**content, "format": algorithm, "kv": kv, "max_tokens": max_tokens}))
            _run([python, str(Path(run_quantize.__file__)), str(config)], progress)
        made = open_checkpoint(f"file:{directory}", cache_dir)
        if made.quantization != algorithm:
            raise unavailable(f"ModelOpt was to write {algorithm} and wrote {made.quantization or 'nothing quantized'}")

    return store.get(manifest, make)


def build(
    store: ArtifactStore,
    python: str,
    features: Features,
    source: str,
    source_digest: str,
    directory: Path,
    precision: str,
    degrees: tuple[int, int],
    limits: Mapping[str, int],
    progress: Progress,
) -> tuple[Path, bool]:
    """Engines of 1.2, one a rank, built side by side. `directory`: a TensorRT-LLM checkpoint (`convert_checkpoint.py`)."""
    if not features.builds_engines:
        raise invalid(
            f"TensorRT-LLM {features.version} builds no engines: the TensorRT backend is in 1.2 only. Serve the checkpoint "
            "itself, quantized by `yard engine quantize` where it must be smaller"
        )
    world = degrees[0] * degrees[1]
    manifest = Manifest(
        kind="engine",
        source=source,
        source_digest=source_digest,
        precision=precision,
        trtllm=features.version,
        cuda=features.cuda,
        compute_capability=features.compute_capability,
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
        limits=dict(limits),
    )

    def make(output: Path) -> None:
        command = [str(Path(python).parent / "trtllm-build"), "--checkpoint_dir", str(directory), "--output_dir", str(output)]
        for name, value in sorted(limits.items()):
            command += [f"--{name}", str(value)]
        progress(0.0, f"building {world} engines")
        _run([*command, "--workers", str(world)], progress)
        missing = [rank for rank in range(world) if not (output / f"rank{rank}.engine").is_file()]
        if missing:
            raise unavailable(f"trtllm-build ended well, but engines of ranks {missing} are missing in {output}")

    return store.get(manifest, make)


def _run(command: Sequence[str], progress: Progress) -> None:
    """YardError with the last lines of what it said."""
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment["PATH"] = f"{Path(command[0]).parent}:{os.environ.get('PATH', '')}"
    last: list[str] = []
    try:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise invalid(f"{command[0]}: {error.strerror}") from error
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = [*last, line.rstrip()][-_TAIL_LINES:]
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    progress(float(said["fraction"]), str(said["what"]))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise unavailable(f"{command[0]} ended with code {process.returncode}:\n" + "\n".join(last))
