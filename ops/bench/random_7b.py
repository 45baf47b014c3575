"""A checkpoint of the reference shape of the GPU benchmarks: Llama-2-7B with random bf16 weights, as Hugging Face keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, LAYERS, HEADS, INTERMEDIATE, CONTEXT = 32000, 4096, 32, 32, 11008, 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHT_BYTES = 2 * (2 * VOCABULARY * HIDDEN + LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN) + HIDDEN)


def write(directory: Path, device: torch.device) -> None:
    """13.5 GB in one file a layer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator(device).manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()

    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    names: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, name))

    ends = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    save("model-ends.safetensors", {**ends, "model.norm.weight": norm.clone()})
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.self_attn.{part}_proj.weight": matrix(HIDDEN, HIDDEN) for part in "qkvo"}
        tensors |= {f"{prefix}.mlp.{part}_proj.weight": matrix(INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        tensors |= {f"{prefix}.{part}_layernorm.weight": norm.clone() for part in ("input", "post_attention")}
        save(f"model-{layer:05d}.safetensors", tensors)
    index = {"metadata": {"total_size": WEIGHT_BYTES}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
