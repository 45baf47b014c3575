"""What an artifact was made of and for. Kept beside it as `modelyard.json`; its key names it in the store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from gateway.api.errors import invalid
from gateway.api.trtllm.features import Features

FILE = "modelyard.json"


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


def mismatches(manifest: Manifest, features: Features, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> list[str]:
    """What differs between what an artifact was made for and where it is to run, in words; empty when it fits.

    A quantized checkpoint runs wherever its format does. An engine runs on the GPU architecture and version that built it.
    """
    if manifest.kind == "quantized":
        return []
    found = []
    if manifest.trtllm != features.version:
        found.append(f"it was built by TensorRT-LLM {manifest.trtllm}, here is {features.version}")
    if manifest.compute_capability != features.compute_capability:
        here = features.compute_capability or "no GPU that can be asked"
        found.append(f"it was built for compute capability {manifest.compute_capability}, here is {here}")
    if manifest.cuda.split(".")[0] != features.cuda.split(".")[0]:
        found.append(f"it was built with CUDA {manifest.cuda}, here is {features.cuda}")
    wanted = (tensor_parallel, pipeline_parallel)
    if (manifest.tensor_parallel, manifest.pipeline_parallel) != wanted:
        made = f"tensor {manifest.tensor_parallel} × pipeline {manifest.pipeline_parallel}"
        found.append(f"it was built for {made}, it is to run as tensor {wanted[0]} × pipeline {wanted[1]}")
    return found


def refuse_misfit(model: str, directory: Path, manifest: Manifest, features: Features, tensor: int, pipeline: int) -> None:
    """YardError(INVALID) names what differs and the command that makes one that fits."""
    found = mismatches(manifest, features, tensor, pipeline)
    if not found:
        return
    limits = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sorted(manifest.limits.items()))
    raise invalid(
        f"model `{model}`: the engine in {directory} does not fit here: {'; '.join(found)}. Build one that does: "
        f"yard engine build {manifest.source} --tensor-parallel {tensor} --pipeline-parallel {pipeline} {limits}".rstrip(),
        field="source",
    )
