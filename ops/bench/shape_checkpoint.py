"""A checkpoint of a Llama shape without its bytes: headers and holes. Benchmarks' ranks make the weights up (`random_rank`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from workers.memory.arena import HOST_PAGE_BYTES

LLAMA_7B = {"hidden": 4096, "layers": 32, "heads": 32, "intermediate": 11008}
LLAMA_13B = {"hidden": 5120, "layers": 40, "heads": 40, "intermediate": 13824}
TINY = {"hidden": 128, "layers": 4, "heads": 4, "intermediate": 256}
VOCABULARY, CONTEXT = 32000, 2048


def write(directory: Path, cache_dir: Path, hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> int:
    """bf16; its bytes. The digests are remembered in `cache_dir`, so that nobody reads the holes to hash them."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    ends = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    files = {"model-ends.safetensors": {**ends, "model.norm.weight": (hidden,)}}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (intermediate, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, intermediate)
        shapes |= {f"{prefix}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
        files[f"model-{layer:05d}.safetensors"] = shapes
    total = sum(_write_holes(directory / name, shapes) for name, shapes in files.items())
    names = {name: file for file, shapes in files.items() for name in shapes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for file in files:
        _remember_digest(directory / file, cache_dir)
    return total


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * _product(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def _remember_digest(path: Path, cache_dir: Path) -> None:
    """As `gateway.api.checkpoint.digest` remembers one: the content of these files is their header."""
    state, where = path.stat(), str(path.resolve())
    memo = cache_dir / "digests" / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.json"
    memo.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(min(state.st_size, HOST_PAGE_BYTES))).hexdigest()
    memo.write_text(json.dumps({"path": where, "size": state.st_size, "mtime_ns": state.st_mtime_ns, "sha256": digest}))


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
