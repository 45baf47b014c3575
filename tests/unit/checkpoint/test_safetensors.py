from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gateway.api.checkpoint import open_checkpoint
from gateway.api.checkpoint.safetensors_header import read_safetensors_header
from gateway.api.errors import ErrorCode, YardError

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(target, max_shard_size="20KB")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    return target


def refused(directory: Path) -> str:
    with pytest.raises(YardError) as caught:
        open_checkpoint(str(directory), directory.parent / "cache")
    assert caught.value.code == ErrorCode.INVALID
    return caught.value.message


def test_a_sharded_directory_is_read_as_it_was_saved(directory: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(f"file:{directory}", tmp_path)
    assert (checkpoint.format, checkpoint.precision, checkpoint.max_context) == ("safetensors", "bf16", 128)
    assert checkpoint.eos_ids == (2, 7)
    assert checkpoint.generation == {"temperature": 0.6}
    assert len([file for file in checkpoint.files if file.suffix == ".safetensors"]) > 1
    model = AutoModelForCausalLM.from_pretrained(directory)
    shape = checkpoint.shape
    assert sum(shape.layer_bytes) + shape.embedding_bytes + shape.head_bytes == 2 * sum(p.numel() for p in model.parameters())


def test_offsets_lead_to_the_values(tmp_path: Path) -> None:
    values = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.arange(4, dtype=torch.int64)}
    save_file(values, tmp_path / "m.safetensors")
    for tensor in read_safetensors_header(tmp_path / "m.safetensors"):
        data = bytearray((tmp_path / "m.safetensors").read_bytes()[tensor.offset : tensor.offset + tensor.bytes])
        assert torch.equal(torch.frombuffer(data, dtype=values[tensor.name].dtype).view(tensor.shape), values[tensor.name])


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(directory)
    (directory / "model.safetensors.index.json").unlink()
    assert "no model.safetensors.index.json" in refused(directory)


def test_a_shard_cut_short_is_named(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    for length in (4, 100, len(content) - 1):
        shard.write_bytes(content[:length])
        message = refused(directory)
        assert str(shard) in message
        assert "copy or download the checkpoint again" in message


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"a": 3}', b'{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 3]}}', b"\xff\xfe"]
)
def test_headers_that_make_no_sense_are_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(YardError, match=r"m\.safetensors"):
        read_safetensors_header(path)


def test_a_pickle_is_never_opened(directory: Path) -> None:
    """rule 15: nothing is unpickled."""
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "safe_serialization" in refused(directory)


def test_a_config_without_its_sizes_names_what_is_missing(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    assert "num_attention_heads" in refused(directory)
    (directory / "config.json").write_text("{")
    assert "config.json" in refused(directory)
