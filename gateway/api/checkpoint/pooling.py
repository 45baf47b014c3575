"""How an encoder makes one vector of a text's hidden states, as sentence-transformers writes it beside the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.api.errors import invalid

ENCODERS = ("bert", "roberta", "xlm-roberta")
"""Families (`model_type`) that read a text and do not write one."""

Mode = Literal["mean", "cls", "max", "last"]
_MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class Pooling:
    mode: Mode = "mean"
    normalize: bool = True


def is_encoder(config: dict[str, Any]) -> bool:
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")


def first_position(config: dict[str, Any]) -> int:
    """The position embedding of a text's first token: RoBERTa's begin after the padding id."""
    return 0 if config.get("model_type") == "bert" else int(config.get("pad_token_id") or 0) + 1


def read_pooling(directory: Path) -> Pooling:
    """Without a description: the mean of all tokens, of length one. YardError(INVALID) for what no mode here is."""
    described = directory / "modules.json"
    if not described.is_file():
        return Pooling()
    modules: list[dict[str, Any]] = _read(described)
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise invalid(f"{described}: its module {unknown[0]} is not one that is computed here", field="source")
    paths = [str(module.get("path", "")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    content = _read(directory / paths[0] / "config.json") if paths else {"pooling_mode_mean_tokens": True}
    chosen = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise invalid(
            f"{directory / paths[0]}: pools by {' and '.join(chosen) or 'nothing'}; one of {', '.join(_MODES)} is computed"
        )
    return Pooling(_MODES[chosen[0]], "Normalize" in kinds)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid(f"{file} cannot be read: {error}", field="source") from error
