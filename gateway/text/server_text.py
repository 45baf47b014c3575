"""The tokenizer of a server that runs elsewhere, from a directory that need not hold its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.api.checkpoint import open_checkpoint, tokenizer_dir
from gateway.api.checkpoint.safetensors_header import read_json
from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from gateway.text.model_text import ModelText

_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx")


def server_text(model: str, spec: ModelSpec, cache_dir: Path) -> ModelText:
    """Of `spec.tokenizer`: a directory with tokenizer.json, or a whole checkpoint. Blocking.

    Where config.json is there too, stop tokens and the longest context are read from it; else spec.context must say the latter.
    """
    assert spec.tokenizer is not None
    directory = Path(spec.tokenizer.removeprefix("file:")).expanduser()
    if not (directory / "tokenizer.json").is_file():
        checkpoint = open_checkpoint(spec.tokenizer, cache_dir)
        return ModelText(
            model,
            tokenizer_dir(checkpoint, cache_dir),
            eos_ids=checkpoint.eos_ids,
            max_context=checkpoint.max_context,
            defaults=checkpoint.generation,
            chat_template=spec.chat_template,
        )
    config, generation = _optional(directory / "config.json"), _optional(directory / "generation_config.json")
    inner = config.get("text_config") or config
    context = spec.context or next((inner[name] for name in _CONTEXT if isinstance(inner.get(name), int)), 0)
    if not context:
        raise invalid(f"model `{model}`: no config.json in {directory} says the longest context; set spec.context", "context")
    eos = {*_ids(generation), *_ids(config), *_ids(inner)} or _named_eos(directory)
    return ModelText(
        model,
        directory,
        eos_ids=tuple(sorted(eos)),
        max_context=context,
        defaults={name: value for name, value in generation.items() if not name.endswith("_token_id")},
        chat_template=spec.chat_template,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(content: dict[str, Any]) -> list[int]:
    value = content.get("eos_token_id")
    return [value] if isinstance(value, int) else [token for token in value or () if isinstance(token, int)]


def _named_eos(directory: Path) -> set[int]:
    """By the name that tokenizer_config.json gives it."""
    token = _optional(directory / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    added = read_json(directory / "tokenizer.json").get("added_tokens") or ()
    return {entry["id"] for entry in added if entry.get("content") == name}
