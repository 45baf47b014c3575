"""A GGUF file as safetensors under Hugging Face names, converted once into the cache and memory-mapped from then on.

4-bit matrices (Q4_0, Q4_1) stay 4-bit, bit for bit; every other block format is de-quantized to fp16. Written tensor by
tensor, so that memory use does not grow with the model.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from gateway.api.checkpoint.seal import damage, seal
from gateway.api.errors import ErrorCode, YardError, invalid
from workers.engines.base import ProgressFn
from workers.engines.torch.gguf_names import DERIVED, LAYOUTS, GgufLayout, hugging_face_name
from workers.engines.torch.int4 import GROUP
from workers.engines.torch.weights import CODES, MINIMA, SCALES

_FORMAT = 2  # part of the file name: raise it when what is written changes
_Q4 = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1)
_PLAIN = {gguf.GGMLQuantizationType.F32: "F32", gguf.GGMLQuantizationType.F16: "F16", gguf.GGMLQuantizationType.BF16: "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_EMBEDDINGS = ("token_embd.weight", "position_embd.weight")  # looked up by row, never multiplied

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Output:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _ITEM_BYTES[self.dtype]


def converted(files: tuple[Path, ...], digest: str, heads: int, kv_heads: int, cache_dir: Path, progress: ProgressFn) -> Path:
    """The converted file, made now if the cache has none that is whole. Of several processes that ask, one converts.

    YardError: INVALID when the architecture or a tensor is not known, or the file does not hold what it says; EXHAUSTED when
    the disk is full; INTERNAL when the cache cannot be written otherwise.
    """
    directory = cache_dir / "weights"
    target = directory / f"{digest}-{_FORMAT}.safetensors"
    if target.exists() and not damage(target):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{digest}.lock"):
            if target.exists():
                problem = damage(target)
                if not problem:
                    return target
                note = f"{target} was damaged ({problem}) and is converted again from {files[0]}"
                log.warning(note)
                progress(0.0, f"converting {files[0].name} again", note)
            for left in directory.glob(f"{digest}*"):  # damaged, of an earlier format, or by a process that was killed
                if left.suffix != ".lock":
                    left.unlink()
            partial = target.with_suffix(f".{os.getpid()}.partial")
            try:
                _convert(files, heads, kv_heads, partial, progress)
                seal(partial, target)
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise _not_written(error, directory, files[0]) from error
    return target


def _not_written(error: OSError, directory: Path, source: Path) -> YardError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(directory, source, str(error.strerror))
    problem = f"{source} cannot be converted into {directory}: {error.strerror or error}"
    return YardError(ErrorCode.INTERNAL, f"{problem} ({error.filename or directory}); make it writable, or set MODELYARD_HOME")


def _full(directory: Path, source: Path, problem: str) -> YardError:
    advice = "make room, or set MODELYARD_HOME to a directory on another disk"
    return YardError(ErrorCode.EXHAUSTED, f"{source} cannot be converted into {directory}: {problem}; {advice}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert(files: tuple[Path, ...], heads: int, kv_heads: int, target: Path, progress: ProgressFn) -> None:
    readers = [_open(file) for file in files]
    architecture = str(readers[0].fields["general.architecture"].contents())
    layout = LAYOUTS.get(architecture)
    if layout is None:
        known = ", ".join(sorted(LAYOUTS))
        raise invalid(f"{files[0]}: the torch engine reads GGUF of {known}, not of {architecture}", field="source")
    tensors = [tensor for reader in readers for tensor in reader.tensors if tensor.name not in DERIVED]
    outputs = [_outputs(files[0], layout, tensor) for tensor in tensors]
    total_bytes = sum(output.bytes for group in outputs for output in group)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < total_bytes:
        problem = f"{total_bytes / 2**30:.2f} GiB are needed there, {free_bytes / 2**30:.2f} GiB are free"
        raise _full(target.parent, files[0], problem)
    done_bytes = 0
    with target.open("wb") as out:
        out.write(_header([output for group in outputs for output in group]))
        for tensor, group in zip(tensors, outputs, strict=True):
            for array in _arrays(layout, tensor, heads, kv_heads):
                out.write(np.ascontiguousarray(array).data)
            done_bytes += sum(output.bytes for output in group)
            progress(done_bytes / total_bytes, f"converting {files[0].name}")
        out.flush()
        os.fsync(out.fileno())


def _open(file: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(file)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}; put it back, or correct the model's source"
        raise invalid(f"{file}: {problem}", field="source") from error
    except (ValueError, KeyError, IndexError) as error:
        raise invalid(f"{file}: cannot be read as GGUF ({error}); copy it again", field="source") from error


def _header(outputs: list[_Output]) -> bytes:
    """Of the safetensors format: https://huggingface.co/docs/safetensors#format"""
    entries: dict[str, object] = {}
    offset = 0
    for output in outputs:
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.bytes],
        }
        offset += output.bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_int4(tensor: gguf.ReaderTensor) -> bool:
    return tensor.tensor_type in _Q4 and tensor.name not in _EMBEDDINGS


def _outputs(file: Path, layout: GgufLayout, tensor: gguf.ReaderTensor) -> list[_Output]:
    name = hugging_face_name(layout, tensor.name)
    if name is None:
        raise invalid(f"{file}: tensor {tensor.name} has no place in this architecture", field="source")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if not _is_int4(tensor):
        return [_Output(name, _PLAIN.get(tensor.tensor_type, "F16"), shape)]
    n, k = shape
    return [
        _Output(name + CODES, "U8", (n, k // 2)),
        _Output(name + SCALES, "F16", (n, k // GROUP)),
        _Output(name + MINIMA, "F16", (n, k // GROUP)),
    ]


def _arrays(layout: GgufLayout, tensor: gguf.ReaderTensor, heads: int, kv_heads: int) -> list[np.ndarray]:
    """In the order of `_outputs`."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if _is_int4(tensor):
        arrays = _int4_arrays(tensor, shape[1])
    elif tensor.tensor_type in _PLAIN:
        arrays = [tensor.data.reshape(shape) if tensor.tensor_type != gguf.GGMLQuantizationType.BF16 else tensor.data]
    else:
        arrays = [dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float16)]
    if layout.interleaved_rope and ".attn_q." in tensor.name:
        arrays = [_halves(array, heads) for array in arrays]
    elif layout.interleaved_rope and ".attn_k." in tensor.name:
        arrays = [_halves(array, kv_heads) for array in arrays]
    if layout.norm_offset and tensor.name.endswith("norm.weight"):
        arrays = [array - np.asarray(layout.norm_offset, dtype=array.dtype) for array in arrays]
    return arrays


def _int4_arrays(tensor: gguf.ReaderTensor, k: int) -> list[np.ndarray]:
    """A block of 32: fp16 scale, (Q4_1) fp16 minimum, 16 bytes; low halves are elements 0..15, high halves 16..31."""
    signed = tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
    blocks = tensor.data.reshape(-1, k // GROUP, 18 if signed else 20)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0]
    minima = (scales * np.float16(-8)) if signed else blocks[..., 2:4].copy().view(np.float16)[..., 0]
    packed = blocks[..., -16:]
    elements = np.concatenate((packed & 15, packed >> 4), axis=-1).reshape(-1, k // 2, 2)
    return [elements[..., 0] | (elements[..., 1] << 4), scales, minima]


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of a rotated projection: per head (r0, r_half, r1, …) back to (r0, r1, …, r_half, …)."""
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
