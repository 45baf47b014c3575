"""Tensors of the Open Inference Protocol as plain values, and back. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.api.errors import YardError, invalid, shortened
from gateway.api.proto.kserve_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse

BYTES = "BYTES"
MAX_RANK = 4

_NUMPY = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`values` in row-major order: bool, int, float, or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Any]


def read_inputs(request: ModelInferRequest) -> dict[str, Tensor]:
    """By name. YardError(INVALID) names the tensor that cannot be read."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents", "raw_input_contents")
    tensors: dict[str, Tensor] = {}
    for position, given in enumerate(request.inputs):
        name = shortened(given.name)
        if given.name in tensors:
            raise invalid(f"input {name} is given twice", name)
        if "shared_memory_region" in given.parameters:
            raise invalid(f"input {name} lies in shared memory, which is not served; send its data", name)
        if given.datatype not in _NUMPY and given.datatype != BYTES:
            raise invalid(f"input {name} has the datatype {shortened(given.datatype)!r}; use {', '.join((*_NUMPY, BYTES))}", name)
        shape = tuple(given.shape)
        if not 1 <= len(shape) <= MAX_RANK or min(shape) < 0:
            raise invalid(f"input {name} has the shape {list(shape[:MAX_RANK])}; send one of 1 to {MAX_RANK} dimensions", name)
        values = _raw(name, given.datatype, raw[position]) if raw else _typed(name, given)
        if math.prod(shape) != len(values):
            raise invalid(f"input {name} has {len(values)} elements, its shape {list(shape)} says {math.prod(shape)}", name)
        tensors[given.name] = Tensor(given.name, given.datatype, shape, values)
    return tensors


def _typed(name: str, given: ModelInferRequest.InferInputTensor) -> list[Any]:
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise invalid(f"input {name} of {given.datatype} can only be sent in raw_input_contents", name)
    return list(getattr(given.contents, field))


def _raw(name: str, datatype: str, raw: bytes) -> list[Any]:
    if datatype == BYTES:
        return _strings(name, raw)
    dtype = _NUMPY[datatype]
    if len(raw) % dtype.itemsize:
        raise invalid(f"input {name} has {len(raw)} bytes, which is no whole number of {datatype} elements", name)
    return np.frombuffer(raw, dtype).tolist()


def _strings(name: str, raw: bytes) -> list[bytes]:
    """Each is its length in four bytes, little endian, and itself."""
    found, position = [], 0
    while position < len(raw):
        end = position + 4
        end += int.from_bytes(raw[position:end], "little") if end <= len(raw) else 1
        if end > len(raw):
            raise invalid(f"input {name} ends in the middle of an element; each is four bytes of length and its bytes", name)
        found.append(raw[position + 4 : end])
        position = end
    return found


def texts(tensor: Tensor) -> list[str]:
    if tensor.datatype != BYTES:
        raise wrong_type(tensor, BYTES)
    try:
        return [value.decode() for value in tensor.values]
    except UnicodeDecodeError as error:
        raise invalid(f"input {tensor.name} is not UTF-8: {error.reason} at byte {error.start}", tensor.name) from error


def integers(tensor: Tensor) -> list[int]:
    if "INT" not in tensor.datatype:
        raise wrong_type(tensor, "INT32, or another integer type")
    return tensor.values


def numbers(tensor: Tensor) -> list[float]:
    if tensor.datatype in (BYTES, "BOOL"):
        raise wrong_type(tensor, "FP32, or another type of numbers")
    return [float(value) for value in tensor.values]


def booleans(tensor: Tensor) -> list[bool]:
    if tensor.datatype != "BOOL":
        raise wrong_type(tensor, "BOOL")
    return tensor.values


def wrong_type(tensor: Tensor, wanted: str) -> YardError:
    return invalid(f"input {tensor.name} is {tensor.datatype}; send {wanted}", tensor.name)


def add_output(
    response: ModelInferResponse, name: str, datatype: str, shape: Sequence[int], values: Sequence[Any], *, raw: bool
) -> None:
    """Answers come as the request came: raw, or typed."""
    output = ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    if not raw:
        output.contents.CopyFrom(InferTensorContents(**{_CONTENTS[datatype]: values}))
    elif datatype == BYTES:
        response.raw_output_contents.append(b"".join(len(value).to_bytes(4, "little") + value for value in values))
    else:
        response.raw_output_contents.append(np.asarray(values, _NUMPY[datatype]).tobytes())
    response.outputs.append(output)
