"""mtq: the configurations by name, and a quantize that calibrates and marks the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FP8_DEFAULT_CFG: dict[str, Any] = {"quant_cfg": {"algo": "FP8"}, "algorithm": "max"}
INT4_AWQ_CFG: dict[str, Any] = {"quant_cfg": {"algo": "W4A16_AWQ"}, "algorithm": "awq_lite"}
FP8_KV_CFG: dict[str, Any] = {"quant_cfg": {"kv": "FP8"}}


def quantize(model: Any, config: dict[str, Any], forward_loop: Callable[[Any], None]) -> Any:
    forward_loop(model)
    model.standin_quantized = config["quant_cfg"]
    return model
