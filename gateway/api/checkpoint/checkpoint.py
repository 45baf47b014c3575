"""One checkpoint, read from its headers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.api.checkpoint.digest import content_digest
from gateway.api.checkpoint.gguf_config import gguf_config
from gateway.api.checkpoint.gguf_header import GgufHeader, read_gguf_header
from gateway.api.checkpoint.quantization import read_quantization
from gateway.api.checkpoint.safetensors_header import SafeTensor, read_json, read_safetensors_dir
from gateway.api.checkpoint.shape import read_shape
from gateway.api.checkpoint.source import resolve
from gateway.api.errors import invalid
from placement.types import ModelShape

_SAFETENSORS_PRECISION = {"F32": "fp32", "F64": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I8": "int8"}
_GGUF_PRECISION = {"Q4_0": "int4", "Q4_1": "int4", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is; its weights stay on disk."""

    source: str
    path: Path  # a .gguf file or a Hugging Face directory
    format: Literal["gguf", "safetensors"]
    files: tuple[Path, ...]  # what the digest covers: weights and, in a directory, its JSON files
    digest: str  # SHA-256, hex
    config: dict[str, Any]  # content of config.json; for GGUF derived from its metadata
    precision: str  # what `precision: auto` means: int4, int8, fp8, bf16, fp16 or fp32
    shape: ModelShape
    eos_ids: tuple[int, ...]
    bos_id: int | None
    generation: dict[str, Any]  # sampling defaults of generation_config.json, such as temperature
    max_context: int
    quantization: str = ""  # algorithm of a quantized directory, such as FP8 or W4A16_AWQ
    kv_quantization: str = ""  # what it was calibrated to keep keys and values in


def open_checkpoint(source: str, cache_dir: Path) -> Checkpoint:
    """Read headers and digest. The first call hashes the files, later ones remember the digest in `cache_dir`.

    YardError(INVALID) names the file, what is wrong with it and the fix.
    """
    path = resolve(source)
    return _open_gguf(source, path, cache_dir) if path.is_file() else _open_directory(source, path, cache_dir)


def _open_gguf(source: str, path: Path, cache_dir: Path) -> Checkpoint:
    headers = [read_gguf_header(file) for file in _gguf_parts(path)]
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    header = GgufHeader(path, headers[0].metadata, tensors)
    config = gguf_config(header)
    files = tuple(part.path for part in headers)
    stored: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.name.startswith("blk."):  # the embedding is often stored wider than the layers
            stored[tensor.type.name] += tensor.bytes
    # Block formats without an operator of their own are de-quantized when they are loaded.
    precision = _GGUF_PRECISION.get(stored.most_common(1)[0][0] if stored else "", "bf16")
    shape = read_shape(config, tensors, precision, resident_as_stored=False)
    eos = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    return Checkpoint(
        source=source,
        path=path,
        format="gguf",
        files=files,
        digest=content_digest(files, cache_dir),
        config=config,
        precision=precision,
        shape=shape,
        eos_ids=tuple(sorted(token for token in eos if isinstance(token, int))),
        bos_id=header.get("tokenizer.ggml.bos_token_id"),
        generation={},
        max_context=shape.max_context,
    )


def _gguf_parts(path: Path) -> list[Path]:
    match = _SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    parts = [path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, int(match[3]) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise invalid(f"{path}: it is one of {match[3]} parts and {', '.join(missing)} is missing; copy all parts beside it")
    return parts


def _open_directory(source: str, path: Path, cache_dir: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    if "build_config" in config and "pretrained_config" in config:
        raise invalid(
            f"{path}: it is a TensorRT engine, which this release builds and checks but does not serve; name the Hugging Face "
            "checkpoint that it was built from, quantized by `yard engine quantize` where it must be smaller",
            field="source",
        )
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    tensors = read_safetensors_dir(path)
    weights = tuple(dict.fromkeys(tensor.file for tensor in tensors))
    described = (path / name for name in ("config.json", "hf_quant_config.json", "tokenizer.json"))
    files = weights + tuple(file for file in described if file.is_file())
    quantization = read_quantization(path, config)
    precision = quantization.precision or _directory_precision(config, tensors)
    shape = read_shape(config, tensors, precision, resident_as_stored=True)
    return Checkpoint(
        source=source,
        path=path,
        format="safetensors",
        files=files,
        digest=content_digest(files, cache_dir),
        config=config,
        precision=precision,
        shape=shape,
        eos_ids=_eos_ids(config, generation),
        bos_id=next((ids[0] for ids in (_ids(generation, "bos"), _ids(config, "bos")) if ids), None),
        generation={name: value for name, value in generation.items() if not name.endswith("_token_id")},
        max_context=shape.max_context,
        quantization=quantization.algorithm,
        kv_quantization=quantization.kv,
    )


def _directory_precision(config: dict[str, Any], tensors: tuple[SafeTensor, ...]) -> str:
    method = (config.get("quantization_config") or {}).get("quant_method", "")
    if method in ("gptq", "awq"):
        return f"int{config['quantization_config'].get('bits', 4)}"
    if method == "fp8":
        return "fp8"
    stored: Counter[str] = Counter()
    for tensor in tensors:
        stored[tensor.dtype] += tensor.bytes
    return _SAFETENSORS_PRECISION.get(stored.most_common(1)[0][0], "bf16")


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sorted({*_ids(generation, "eos"), *_ids(config, "eos")}))


def _ids(content: dict[str, Any], name: str) -> list[int]:
    value = content.get(f"{name}_token_id")
    return [value] if isinstance(value, int) else [token for token in value or () if isinstance(token, int)]
