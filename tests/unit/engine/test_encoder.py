"""Encoders give the vectors that transformers gives, however their texts come and go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_runner import load_command
from transformers import AutoModel, BertConfig, BertModel, RobertaConfig, RobertaModel

from gateway.api.checkpoint import open_checkpoint
from gateway.api.errors import YardError
from workers.comm.single import SingleComm
from workers.engines.torch.encoder import EncoderShard
from workers.engines.torch.engine import TorchEngine
from workers.memory.arena import HostArena
from workers.messages import NewSequence, Sampling, SequenceStep, Step

_SHAPE = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXTS = [[2, 9, 17, 3], list(range(4, 41)), [5], [7, 7, 7, 8, 9, 10, 11]]


def save(directory: Path, family: str, pooling: str | None, normalize: bool = True) -> Path:
    torch.manual_seed(3)
    if family == "bert":
        model = BertModel(BertConfig(**_SHAPE, max_position_embeddings=64))
    else:
        model = RobertaModel(RobertaConfig(**_SHAPE, max_position_embeddings=66, pad_token_id=1))
    model.save_pretrained(directory)
    if pooling:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": False, pooling: True}))
    return directory


def expected(directory: Path, text: list[int], pooling: str, normalize: bool) -> np.ndarray:
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(directory).eval()(input_ids=torch.tensor([text])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "last": hidden[-1]}[pooling]
    return (vector / vector.norm() if normalize else vector).numpy()


def load(directory: Path, cache: Path, **options: object) -> EncoderShard:
    shard = TorchEngine(cache).load(load_command(directory, **options), 0, HostArena(2**28), SingleComm(), lambda *_: None)
    assert isinstance(shard, EncoderShard)
    return shard


def part(sequence: int, tokens: list[int], start: int = 0, *, sample: bool = True) -> SequenceStep:
    new = NewSequence(Sampling()) if start == 0 else None
    return SequenceStep(sequence, tuple(tokens), start, (), sample, new)


def vectors(shard: EncoderShard, *parts: SequenceStep, released: tuple[int, ...] = ()) -> dict[int, np.ndarray]:
    sampled = shard.step(Step(1, 1, parts, released)).sampled
    return {token.sequence: np.frombuffer(token.embedding, "<f4") for token in sampled}


@pytest.mark.parametrize(
    ("family", "mode", "normalize"),
    [
        ("bert", "mean", True),
        ("bert", "cls", False),
        ("bert", "max", True),
        ("roberta", "mean", True),
        ("roberta", "last", False),
    ],
)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, mode: str, normalize: bool) -> None:
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
    directory = save(tmp_path / "model", family, names.get(mode, "pooling_mode_lasttoken"), normalize)
    shard = load(directory, tmp_path)
    found = vectors(shard, *(part(index, text) for index, text in enumerate(TEXTS)))
    for index, text in enumerate(TEXTS):
        np.testing.assert_allclose(found[index], expected(directory, text, mode, normalize), atol=2e-5)
    shard.close()


def test_chunks_are_put_together_and_a_park_changes_nothing(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "bert", None)
    shard = load(directory, tmp_path)
    text = TEXTS[1]
    assert vectors(shard, part(1, text[:20], sample=False)) == {}
    first = vectors(shard, part(1, text[20:], 20))[1]
    np.testing.assert_allclose(first, expected(directory, text, "mean", True), atol=2e-5)
    with pytest.raises(ValueError, match="cannot be parked"):
        shard.park()
    vectors(shard, released=(1,))
    before = shard.held().bytes
    shard.park()
    assert sum(shard.held().bytes.values()) == 0
    shard.wake(8).wait(10)
    assert shard.held().bytes == before
    np.testing.assert_array_equal(vectors(shard, part(2, text))[2], first)


def test_its_bytes_are_counted_and_it_is_computed_whole(tmp_path: Path) -> None:
    """Rule 3: never more than its budget."""
    directory = save(tmp_path / "model", "bert", None)
    shape = open_checkpoint(f"file:{directory}", tmp_path).shape
    assert (shape.encoder, shape.kv_heads * shape.head_dim) == (True, 1)
    with pytest.raises(MemoryError):
        load(directory, tmp_path, budget={"weights": 4096})
    with pytest.raises(YardError, match="precision"):
        load(directory, tmp_path, precision="int4")
