"""SamplingParams by the facts."""

from __future__ import annotations

import inspect
from typing import Any

from tensorrt_llm.llmapi.llm_args import FACTS

_DEFAULTS = {row["name"]: row["default"] for row in FACTS["sampling_params"]}


class SamplingParams:
    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - _DEFAULTS.keys()
        if unknown:
            raise TypeError(f"SamplingParams got an unexpected keyword argument {sorted(unknown)[0]!r}")
        for name, default in _DEFAULTS.items():
            setattr(self, name, values.get(name, default))
        if self.max_tokens is not None and self.max_tokens <= 0:
            raise ValueError("max_tokens must be greater than 0")

    max_tokens: int
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in _DEFAULTS.items()]
    )
