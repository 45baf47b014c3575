"""What an artifact was made of and for. Kept beside it as `modelyard.json`; its key names it in the store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from gateway.api.errors import invalid
from gateway.api.trtllm.features import Features

FILE = "modelyard.json"

# The first GPUs whose tensor cores compute in a format; formats that are not here run on all that the library supports.
LEAST_CAPABILITY = {"FP8": (8, 9), "W4A8_AWQ": (8, 9), "NVFP4": (10, 0)}


class Manifest(msgspec.Struct, frozen=True):
    kind: Literal["quantized", "engine"]
    source: str  # for people; the digest says what it is
    source_digest: str
    precision: str  # quantization format, such as FP8
    kv_precision: str = ""
    trtllm: str = ""  # versions
    modelopt: str = ""
    cuda: str = ""
    compute_capability: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    limits: dict[str, int] = {}  # max_batch_size, max_num_tokens, max_seq_len
    calibration_digest: str = ""

    @property
    def key(self) -> str:
        """Changes with every input; not with where the source lies."""
        inputs = msgspec.structs.replace(self, source="")
        return hashlib.sha256(msgspec.json.encode(inputs, order="deterministic")).hexdigest()[:32]


def read_manifest(directory: Path) -> Manifest | None:
    """None when the directory is no artifact of ours. YardError for one that is damaged."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise invalid(f"{path}: it is no manifest ({error}); make the artifact again") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def mismatches(manifest: Manifest, features: Features, degrees: tuple[int, int] | None = None) -> list[str]:
    """What differs between what an artifact was made for and where it is to run, in words; empty when it fits.

    A quantized checkpoint runs on the GPUs that compute in its format. An engine runs on the GPU architecture and version that
    built it. `degrees`: tensor × pipeline, where they are decided.
    """
    here = features.compute_capability or "no GPU that can be asked"
    if manifest.kind == "quantized":
        least = LEAST_CAPABILITY.get(manifest.precision)
        if least is None or not features.compute_capability or capability(features.compute_capability) >= least:
            return []
        return [f"{manifest.precision} needs compute capability {least[0]}.{least[1]}, here is {here}"]
    found = []
    if manifest.trtllm != features.version:
        found.append(f"it was built by TensorRT-LLM {manifest.trtllm}, here is {features.version}")
    if manifest.compute_capability != features.compute_capability:
        found.append(f"it was built for compute capability {manifest.compute_capability}, here is {here}")
    if manifest.cuda.split(".")[0] != features.cuda.split(".")[0]:
        found.append(f"it was built with CUDA {manifest.cuda}, here is {features.cuda}")
    if degrees is not None and (manifest.tensor_parallel, manifest.pipeline_parallel) != degrees:
        made = f"tensor {manifest.tensor_parallel} × pipeline {manifest.pipeline_parallel}"
        found.append(f"it was built for {made}, it is to run as tensor {degrees[0]} × pipeline {degrees[1]}")
    return found


def refuse_misfit(model: str, directory: Path, features: Features, degrees: tuple[int, int] | None = None) -> None:
    """YardError(INVALID) names what differs and the command that makes one that fits. What is no artifact of ours passes."""
    manifest = read_manifest(directory)
    found = mismatches(manifest, features, degrees) if manifest is not None else []
    if manifest is None or not found:
        return
    if manifest.kind == "quantized":
        command = f"yard engine quantize {manifest.source} --format W4A16_AWQ --calibration PROMPTS"
        what = "quantized checkpoint"
    elif features.builds_engines:
        tensor, pipeline = degrees or (manifest.tensor_parallel, manifest.pipeline_parallel)
        limits = "".join(f" --{name.replace('_', '-')} {value}" for name, value in sorted(manifest.limits.items()))
        command = f"yard engine build {manifest.source} --tensor-parallel {tensor} --pipeline-parallel {pipeline}{limits}"
        what = "engine"
    else:
        what, command = "engine", "this version builds none: give the original Hugging Face directory as the source"
    raise invalid(
        f"model `{model}`: the {what} in {directory} does not fit here: {'; '.join(found)}. To have one that does: {command}",
        field="source",
    )


def capability(text: str) -> tuple[int, int]:
    """9.0 is (9, 0)."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
