"""A Hugging Face directory of a few MiB, of nothing but zeros: what the stand-in of TensorRT-LLM is given to load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def write_checkpoint(directory: Path, layers: int = 2, hidden: int = 128, vocabulary: int = 512) -> Path:
    directory.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * hidden, "vocab_size": vocabulary,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        kv = hidden // 2
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden), f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden), f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (2 * hidden, hidden), f"{prefix}.mlp.up_proj.weight": (2 * hidden, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, 2 * hidden), f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}, directory / "model.safetensors"
    )
    _tokenizer().save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return directory


def _tokenizer() -> Tokenizer:
    """Every byte is a token."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    alphabet = {letter: 3 + index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab={**special, **alphabet}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer
