"""export_hf_checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def export_hf_checkpoint(model: Any, export_dir: str) -> None:
    model.save_pretrained(export_dir)
    quantization = {"quant_algo": model.standin_quantized["algo"], "kv_cache_quant_algo": model.standin_quantized.get("kv")}
    content = {
        "producer": {"name": "modelopt", "version": "0.0"},
        "quantization": {**quantization, "exclude_modules": ["lm_head"]},
    }
    (Path(export_dir) / "hf_quant_config.json").write_text(json.dumps(content))
