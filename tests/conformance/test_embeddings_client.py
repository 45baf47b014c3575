"""The openai client asks a running site for embeddings of a model that was applied to it, and transformers gives the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from house import House
from openai import OpenAI
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

pytestmark = pytest.mark.site

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "sat", "on", "a", "mat", "ran")
TEXTS = ["the cat sat on a mat", "a dog ran"]


def save_model(directory: Path) -> BertModel:
    torch.manual_seed(5)
    model = BertModel(
        BertConfig(vocab_size=len(WORDS), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    )
    model.eval().save_pretrained(directory)
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def test_embeddings(house: House, tmp_path: Path) -> None:
    reference = save_model(tmp_path / "bert")
    document = {
        "apiVersion": "modelyard/v1",
        "kind": "Model",
        "metadata": {"name": "embedder"},
        "spec": {"source": f"file:{tmp_path / 'bert'}"},
    }
    (tmp_path / "embedder.yaml").write_text(yaml.safe_dump(document))
    applied = house.yard("apply", "-f", str(tmp_path / "embedder.yaml"), server=True)
    assert applied.returncode == 0, applied.stderr
    try:
        house.wait_ready("embedder")
        answer = OpenAI(base_url=f"{house.http_url}/v1", api_key="unused").embeddings.create(model="embedder", input=TEXTS)
        for text, found in zip(TEXTS, answer.data, strict=True):
            ids = [2, *(WORDS.index(word) for word in text.split()), 3]
            with torch.inference_mode():
                mean = reference(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(found.embedding, (mean / mean.norm()).numpy(), atol=1e-4)
        ledgers = [
            line for pool in house.status().pools for rank in pool.ranks for line in rank.ledger if line[0].startswith("embedder")
        ]
        assert json.dumps(ledgers).count("weights") == 1
    finally:
        house.yard("delete", "model", "embedder", server=True)
