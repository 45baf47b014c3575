"""How a Hugging Face directory is quantized: by ModelOpt's `hf_quant_config.json`, or `quantization_config` of its config.json.

ModelOpt writes {"producer": {"name": "modelopt", ...}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" or
null, "exclude_modules": ["lm_head"], ...}}; the algorithms are TensorRT-LLM's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.api.checkpoint.safetensors_header import read_json
from gateway.api.errors import invalid

# Algorithm -> what its matrices take in memory, as ModelSpec.precision says it.
ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_BLOCK_SCALES": "fp8",
    "NVFP4": "int4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "W4A16_GPTQ": "int4",
    "W4A8_GPTQ": "int4",
    "W4A16": "int4",
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A8_SQ_PER_TENSOR_PLUGIN": "int8",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "int8",
}
KV_ALGORITHMS = ("FP8", "NVFP4", "INT8")
_BY_METHOD = {"fp8": "FP8_BLOCK_SCALES", "awq": "W4A16_AWQ", "gptq": "W4A16_GPTQ"}


@dataclass(frozen=True)
class Quantization:
    algorithm: str = ""  # empty: not quantized
    kv: str = ""
    group_size: int = 0
    producer: str = ""

    @property
    def precision(self) -> str:
        return ALGORITHMS.get(self.algorithm, "")


def read_quantization(directory: Path, config: dict[str, Any]) -> Quantization:
    """YardError(INVALID) for a file that does not say what it should, or an algorithm that nothing here knows."""
    path = directory / "hf_quant_config.json"
    if not path.is_file():
        return _of_config(config)
    content = read_json(path)
    found = content.get("quantization")
    if not isinstance(found, dict):
        raise invalid(f"{path}: it has no `quantization` object; export the checkpoint again with ModelOpt", field="source")
    algorithm, kv = found.get("quant_algo") or "", found.get("kv_cache_quant_algo") or ""
    if algorithm and algorithm not in ALGORITHMS:
        raise invalid(f"{path}: quant_algo {algorithm!r} is none of {', '.join(sorted(ALGORITHMS))}", field="source")
    if kv and kv not in KV_ALGORITHMS:
        raise invalid(f"{path}: kv_cache_quant_algo {kv!r} is none of {', '.join(KV_ALGORITHMS)}", field="source")
    producer = content.get("producer") or {}
    name = " ".join(str(producer.get(part, "")) for part in ("name", "version")) if isinstance(producer, dict) else ""
    return Quantization(algorithm, kv, int(found.get("group_size") or 0), name.strip())


def _of_config(config: dict[str, Any]) -> Quantization:
    found = config.get("quantization_config") or {}
    algorithm = _BY_METHOD.get(found.get("quant_method", ""), "")
    return Quantization(algorithm, "", int(found.get("group_size") or 0), found.get("quant_method", ""))
