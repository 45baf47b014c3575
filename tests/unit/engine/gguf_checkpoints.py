"""GGUF files of the random checkpoints, in the conventions of llama.cpp's converter (names from the `gguf` package)."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize, quantize
from random_checkpoints import FAMILIES, generate
from transformers import AutoModelForCausalLM

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}


def write_gguf(family: str, directory: Path, path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The checkpoint in `directory` with its matrices as `kind`, its embedding as Q8_0 and everything else as F32."""
    config = FAMILIES[family]
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[architecture])
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(heads)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(architecture, layers)
    state = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target, name
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            n = heads if "q_proj" in name else kv_heads
            tensor = tensor.reshape(n, 2, tensor.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        if family == "gemma2" and "norm" in name:
            tensor = tensor + 1
        if family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        array = tensor.contiguous().numpy()
        if tensor.dim() == 1 or "wpe" in name:
            writer.add_tensor(target, array)
        else:
            own = gguf.GGMLQuantizationType.Q8_0 if "embed" in name or "wte" in name else kind
            writer.add_tensor(target, quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy_with_stored_values(
    family: str, directory: Path, kind: gguf.GGMLQuantizationType, prompt: list[int], count: int
) -> list[int]:
    """transformers' own answer in fp32, with the values that `write_gguf` stored. Row order does not change what is stored."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "wpe" not in name:
                own = gguf.GGMLQuantizationType.Q8_0 if "embed" in name or "wte" in name else kind
                transposed = family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                stored = (parameter.t() if transposed else parameter).contiguous().numpy()
                values = torch.from_numpy(dequantize(quantize(stored, own), own))
                if own == gguf.GGMLQuantizationType.Q8_0:
                    values = values.half().float()  # what blocks without an operator of their own are kept in
                parameter.copy_(values.t() if transposed else values)
    return generate(model, prompt, count)
