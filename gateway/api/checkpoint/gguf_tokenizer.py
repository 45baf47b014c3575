"""A byte-level BPE tokenizer straight from GGUF metadata, as the original model's tokenizer.json has it.

Half a second where importing transformers takes eight. It is also closer: transformers drops how text is split before
merging for names it does not know (`smollm`: digits one by one, so that `4\\n\\n5` keeps its double line break).
Splits: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from gateway.api.checkpoint.gguf_header import GgufHeader

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _split(name: str) -> PreTokenizer | None:
    """None for a name whose split is not known here."""
    if name in ("gpt-2", "gpt2"):
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "starcoder", "refact", "command-r", "codeshell"):
        return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    pattern = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}.get(name)
    if pattern is None:
        return None
    return pre_tokenizers.Sequence(
        [Split(Regex(pattern), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def write_gguf_tokenizer(header: GgufHeader, directory: Path) -> bool:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; False, nothing written, for another kind of tokenizer."""
    name = header.get("tokenizer.ggml.pre", "")
    split = _split(name) if header.get("tokenizer.ggml.model") == "gpt2" else None
    tokens, merges = header.strings("tokenizer.ggml.tokens"), header.strings("tokenizer.ggml.merges")
    if split is None or not tokens or not merges:
        return False
    whole_words_first = name.startswith("llama")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
            ignore_merges=whole_words_first,
        )
    )
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    kinds = header.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == _USER_DEFINED])
    bos = _token(header, tokens, "bos")
    if bos is not None and header.get("tokenizer.ggml.add_bos_token", whole_words_first):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_config(header, tokens, directory)
    return True


def _write_config(header: GgufHeader, tokens: list[str], directory: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(header.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.of_architecture("context_length"),
        **{name: token for name, key in _SPECIAL.items() if (token := _token(header, tokens, key)) is not None},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    template = header.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _token(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    index = header.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
