"""Run as a file by the interpreter that has ModelOpt: `python run_quantize.py CONFIG`. It says how far it is in lines of JSON.

Standard library only, besides what ModelOpt's environment has.

CONFIG: JSON with source, output, prompts (a file with one JSON string a line), format, kv, max_tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Format of the checkpoint -> ModelOpt's configuration of it.
CONFIGURATIONS = {
    "FP8": "FP8_DEFAULT_CFG",
    "W4A16_AWQ": "INT4_AWQ_CFG",
    "W4A8_AWQ": "W4A8_AWQ_BETA_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W8A8_SQ_PER_CHANNEL": "INT8_SMOOTHQUANT_CFG",
}
KV_CONFIGURATIONS = {"FP8": "FP8_KV_CFG"}


def main(config: dict[str, Any]) -> None:
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    import torch
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    say(0.0, "loading the model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(config["source"], torch_dtype="auto").to(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config["source"])
    except (OSError, ValueError):  # a directory with nothing but tokenizer.json
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(config["source"]) / "tokenizer.json"))
    prompts = [json.loads(line) for line in Path(config["prompts"]).read_text().splitlines()]

    def calibrate(quantized: Any) -> None:
        for number, prompt in enumerate(prompts, 1):
            ids = tokenizer(prompt, truncation=True, max_length=config["max_tokens"], return_tensors="pt").input_ids
            with torch.no_grad():
                quantized(ids.to(device))
            if number % 10 == 0 or number == len(prompts):
                say(0.1 + 0.8 * number / len(prompts), f"calibrating: {number} of {len(prompts)} prompts")

    chosen = getattr(mtq, CONFIGURATIONS[config["format"]])
    if config["kv"]:
        kv = getattr(mtq, KV_CONFIGURATIONS[config["kv"]])
        chosen = {**chosen, "quant_cfg": {**chosen["quant_cfg"], **kv["quant_cfg"]}}
    say(0.1, "calibrating")
    model = mtq.quantize(model, chosen, forward_loop=calibrate)
    say(0.9, "writing the checkpoint")
    export_hf_checkpoint(model, export_dir=config["output"])
    tokenizer.save_pretrained(config["output"])
    say(1.0, "done")


def say(fraction: float, what: str) -> None:
    print(json.dumps({"fraction": fraction, "what": what}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
