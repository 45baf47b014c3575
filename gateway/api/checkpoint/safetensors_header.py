"""Headers of a Hugging Face directory of safetensors: which tensors there are, of what type, in which file.

A file is an 8-byte little-endian length, that many bytes of JSON, then the data.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gateway.api.errors import YardError, invalid

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class SafeTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: BF16, F32, ...
    file: Path
    offset: int  # from the start of the file
    bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


def read_safetensors_dir(directory: Path) -> tuple[SafeTensor, ...]:
    """All tensors of the checkpoint, in the order of their files. YardError(INVALID) for a missing or broken file."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _broken(index, "it has no weight_map")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise _broken(index, f"it names {len(missing)} of {len(names)} files that are missing: {', '.join(missing)}")
        tensors = tuple(tensor for name in names for tensor in read_safetensors_header(directory / name))
        absent = sorted(weight_map.keys() - {tensor.name for tensor in tensors})
        if absent:
            raise _broken(index, f"its files lack {len(absent)} tensors that it names, such as {absent[0]}")
        return tensors
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        problem = "it holds no .safetensors file"
        pickles = sorted(file.name for file in directory.glob("*.bin"))
        if pickles:
            problem += f" ({pickles[0]} is a pickle, which is never opened); save the model with safe_serialization=True"
            raise invalid(f"{directory}: {problem}", field="source")
        raise _broken(directory, problem)
    parts = [file for file in files if "-of-" in file.stem]
    if parts:
        total = int(parts[0].stem.rsplit("-of-", 1)[1])
        if len(parts) != total:
            raise _broken(directory, f"it holds {len(parts)} of {total} parts and no model.safetensors.index.json")
        files = parts
    elif (directory / "model.safetensors") in files:
        files = [directory / "model.safetensors"]
    return tuple(tensor for file in files for tensor in read_safetensors_header(file))


def read_safetensors_header(path: Path) -> tuple[SafeTensor, ...]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _broken(path, f"it has {size} bytes, less than a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"it is cut short or no safetensors file: its header claims {length} of {size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise _broken(path, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    return tuple(_tensor(path, name, entry, 8 + length, size) for name, entry in header.items())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _broken(path, f"it is no JSON ({error})") from error
    except OSError as error:
        raise _broken(path, f"it cannot be read ({error.strerror})") from error
    if not isinstance(content, dict):
        raise _broken(path, "it is no JSON object")
    return content


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> SafeTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(dimension) for dimension in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"tensor {name} has no proper dtype, shape and data_offsets") from error
    if dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name} has the unknown type {dtype}")
    if end - begin != prod(shape) * DTYPE_BITS[dtype] // 8:
        raise _broken(path, f"tensor {name} of shape {list(shape)} and type {dtype} claims {end - begin} bytes")
    if begin < 0 or data_start + end > size:
        raise _broken(path, f"it is cut short: tensor {name} ends {data_start + end - size} bytes beyond the end of the file")
    return SafeTensor(name, shape, dtype, path, data_start + begin, end - begin)


def _broken(path: Path, problem: str) -> YardError:
    return invalid(f"{path}: {problem}; copy or download the checkpoint again", field="source")
