"""A checkpoint of a Llama shape without its bytes: headers and holes. Benchmarks' ranks make the weights up (`random_rank`)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.memory.arena import HOST_PAGE_BYTES

VOCABULARY, CONTEXT = 32000, 2048


@dataclass(frozen=True)
class Llama:
    """One shape; `files` names each tensor's shape by the file it lies in, one a layer."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = VOCABULARY

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @property
    def files(self) -> dict[str, dict[str, tuple[int, ...]]]:
        hidden, intermediate = self.hidden, self.intermediate
        ends = {"model.embed_tokens.weight": (self.vocabulary, hidden), "lm_head.weight": (self.vocabulary, hidden)}
        files: dict[str, dict[str, tuple[int, ...]]] = {"model-ends.safetensors": {**ends, "model.norm.weight": (hidden,)}}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            shapes: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
            shapes |= {f"{prefix}.mlp.{part}_proj.weight": (intermediate, hidden) for part in ("gate", "up")}
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, intermediate)
            shapes |= {f"{prefix}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
            files[f"model-{layer:05d}.safetensors"] = shapes
        return files

    @property
    def weight_bytes(self) -> int:
        """In bf16."""
        return sum(2 * math.prod(shape) for shapes in self.files.values() for shape in shapes.values())

    def write_heads(self, directory: Path) -> None:
        """What a checkpoint has beside its weights: the configuration, and which file has what."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        names = {name: file for file, shapes in self.files.items() for name in shapes}
        index = {"metadata": {"total_size": self.weight_bytes}, "weight_map": names}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


LLAMA_7B = Llama(hidden=4096, layers=32, heads=32, intermediate=11008)
LLAMA_13B = Llama(hidden=5120, layers=40, heads=40, intermediate=13824)
TINY = Llama(hidden=128, layers=4, heads=4, intermediate=256)


def write(directory: Path, cache_dir: Path, shape: Llama) -> int:
    """Its bytes. The digests are remembered in `cache_dir`, so that nobody reads the holes to hash them."""
    shape.write_heads(directory)
    total = sum(_write_holes(directory / name, shapes) for name, shapes in shape.files.items())
    for file in shape.files:
        _remember_digest(directory / file, cache_dir)
    return total


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
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
