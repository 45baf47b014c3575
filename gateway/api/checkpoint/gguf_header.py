"""The header of a GGUF file: metadata and where each tensor lies. No tensor data is read.

The `gguf` package's reader makes one object per vocabulary entry, 2-3 s for 49,152 of them; walking the bytes takes 50 ms, and
every read is checked against the end of the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gateway.api.errors import YardError, invalid

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # in torch order: the last dimension is contiguous
    type: GGMLQuantizationType
    file: Path
    offset: int  # from the start of the file
    bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class _LazyArray:
    """A string array that was walked but not decoded: vocabularies and merges are megabytes that few callers want."""

    start: int
    count: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]  # scalars, strings and numeric arrays; string arrays through `strings`
    tensors: tuple[GgufTensor, ...]

    @cached_property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise _broken(self.path, "its metadata has no general.architecture")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def of_architecture(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def strings(self, key: str) -> list[str]:
        """A string array such as tokenizer.ggml.tokens; empty when the file has none."""
        array = self.metadata.get(key)
        if not isinstance(array, _LazyArray):
            return []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, self.path, array.start)
            return [cursor.string() for _ in range(array.count)]

    def count(self, key: str) -> int:
        array = self.metadata.get(key)
        return array.count if isinstance(array, _LazyArray) else 0


def read_gguf_header(path: Path) -> GgufHeader:
    """YardError(INVALID) when the file is cut short, is no GGUF, or names data beyond its end."""
    size = path.stat().st_size
    if size < 24:
        raise _broken(path, f"it has {size} bytes, less than a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise _broken(path, f"it begins with {data[:4]!r}, not with GGUF")
        cursor = _Cursor(data, path, 4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise _broken(path, f"it is GGUF version {version} (or big-endian); versions 2 and 3, little-endian, are known")
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = _tensors(cursor, tensor_count, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    for tensor in tensors:
        if tensor.offset + tensor.bytes > size:
            missing = tensor.offset + tensor.bytes - size
            raise _broken(path, f"it is cut short: tensor {tensor.name} ends {missing} bytes beyond the end of the file")
    return GgufHeader(path, metadata, tuple(tensors))


def _tensors(cursor: _Cursor, count: int, alignment: int) -> list[GgufTensor]:
    entries = []
    for _ in range(count):
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise _broken(cursor.path, f"tensor {name} claims {dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
        entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    data_start = -(-cursor.position // alignment) * alignment
    return [_tensor(cursor.path, name, shape, kind, data_start + offset) for name, shape, kind, offset in entries]


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        type_ = GGMLQuantizationType(kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError) as error:
        problem = f"tensor {name} is stored as GGML type {kind}, which the installed gguf package does not know"
        raise invalid(f"{path}: {problem}; upgrade the gguf package or convert the file", field="source") from error
    if shape and shape[-1] % block_elements:
        raise _broken(path, f"tensor {name} has rows of {shape[-1]}, no multiple of the {block_elements} of {type_.name}")
    return GgufTensor(name, shape, type_, path, offset, prod(shape) // block_elements * block_bytes)


class _Cursor:
    """Reads forward through the header; never beyond the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path, position: int) -> None:
        self._data = data
        self.path = path
        self.position = position

    def _take(self, count: int) -> int:
        start = self.position
        if count > len(self._data) - start:
            raise _broken(self.path, f"it is cut short: its header needs {count} bytes at {start} of {len(self._data)}")
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self._take(length)
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise _broken(self.path, f"its metadata holds a value of unknown type {kind} before byte {self.position}")

    def _array(self) -> list[Any] | _LazyArray:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            form = f"<{min(count, len(self._data))}{_SCALARS[kind]}"
            return list(struct.unpack_from(form, self._data, self._take(struct.calcsize(form))))
        if kind != _STRING:
            raise _broken(self.path, f"its metadata holds an array of unknown type {kind} before byte {self.position}")
        array = _LazyArray(self.position, count)
        for _ in range(count):
            self._take(self.scalar("Q"))
        return array


def _broken(path: Path, problem: str) -> YardError:
    return invalid(f"{path}: {problem}; copy or download the file again", field="source")
