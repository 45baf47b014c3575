"""Logits are exact in fp32 where it matters: no false ties, one greedy text whatever is reported, log-probabilities that hold."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import VOCABULARY
from shard_runner import Runner, answer, load

from workers.engines.base import DamagedModelError
from workers.engines.torch import int4
from workers.engines.torch.head import RescoredHead, RoundedHead, ScreenedHead, rounding_errors
from workers.engines.torch.linear import DenseLinear, Int8Linear
from workers.messages import Sampling

PROMPT = [5, 9, 77, 3, 120, 44]
GENERATOR = torch.Generator().manual_seed(11)
HIDDEN = torch.randn(40, 128, generator=GENERATOR).to(torch.bfloat16) * 3


def heads() -> dict[str, tuple[RescoredHead, torch.Tensor]]:
    """By kind, with the weights that it stands for."""
    weight = torch.randn(2048, 128, generator=GENERATOR).to(torch.bfloat16)
    blocks = int4.quantize(weight)
    scales = weight.float().abs().amax(dim=1) / 127
    codes = (weight.float() / scales.unsqueeze(1)).round().to(torch.int8)
    scales = scales.to(torch.bfloat16)
    bias = torch.randn(2048, generator=GENERATOR).to(torch.bfloat16)
    return {
        "int4": (ScreenedHead(weight, *int4.pack(blocks), rounding_errors(weight, blocks)), weight.float()),
        "bf16": (RoundedHead(DenseLinear(weight, None)), weight.float()),
        "bf16 and bias": (RoundedHead(DenseLinear(weight, bias)), weight.float()),
        "int8": (RoundedHead(Int8Linear(codes, scales, None)), codes.float() * scales.float().unsqueeze(1)),
    }


@pytest.mark.parametrize("kind", ["int4", "bf16", "bf16 and bias", "int8"])
def test_the_likely_logits_are_those_of_fp32(kind: str) -> None:
    head, weight = heads()[kind]
    exact = HIDDEN.float() @ weight.T
    if isinstance(head, RoundedHead) and head.linear.bias is not None:
        exact = exact + head.linear.bias.float()
    logits = head(HIDDEN)
    assert logits.dtype == torch.float32
    likely = exact >= exact.amax(-1, keepdim=True) - 8.0
    torch.testing.assert_close(logits[likely], exact[likely], rtol=1e-5, atol=1e-3)
    assert float((logits.log_softmax(-1) - exact.log_softmax(-1))[likely].abs().max()) < 0.02
    assert head.argmax(HIDDEN) == exact.argmax(-1).tolist() == logits.argmax(-1).tolist()


def test_neighbours_that_bf16_makes_equal_are_told_apart() -> None:
    weight = torch.zeros(64, 32)
    weight[:, 0] = 100.0
    weight[:, 1] = torch.linspace(0.0, 0.1, 64)  # the last one is the largest, by less than bf16 shows
    head = RoundedHead(DenseLinear(weight.to(torch.bfloat16), None))
    hidden = torch.ones(1, 32, dtype=torch.bfloat16)
    assert len(set(head.linear(hidden)[0].tolist())) == 1
    assert head.argmax(hidden) == [63] == head(hidden).argmax(-1).tolist()


def test_noise_is_added_before_the_largest_is_found() -> None:
    head, weight = heads()["int4"]
    noise = torch.randn(len(HIDDEN), weight.shape[0], generator=GENERATOR) * 20
    wanted = (HIDDEN.float() @ weight.T + noise).argmax(-1).tolist()
    assert head.argmax(HIDDEN, list(noise)) == wanted


@pytest.mark.parametrize("kind", ["int4", "bf16", "int8"])
def test_a_damaged_row_is_found(kind: str) -> None:
    head, _ = heads()[kind]
    hidden = HIDDEN.clone()
    hidden[3, 5] = float("nan")
    with pytest.raises(DamagedModelError):
        head.argmax(hidden)
    assert not head(hidden)[3].isfinite().all()


@pytest.mark.parametrize("precision", ["int4", "bf16", "int8", "fp32"])
def test_greedy_text_does_not_depend_on_what_is_reported(precision: str, checkpoints, cache) -> None:
    shard = load(checkpoints("llama-tied-bias"), cache, precision=precision)
    for seed in range(4):
        prompt = [(token + 31 * seed) % VOCABULARY for token in PROMPT]
        plain = [one.token for one in answer(shard, prompt, 24)]
        reported = answer(shard, prompt, 24, Sampling(logprobs=3))
        assert [one.token for one in reported] == plain
        assert all(one.alternative_ids[0] == one.token and one.logprob == one.alternative_logprobs[0] for one in reported)


@pytest.mark.parametrize("precision", ["int4", "fp32"])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 30, "min_p": 0.01, "logprobs": 2}])
def test_a_seed_gives_its_text_alone_among_others_chunked_and_resumed(precision: str, sampling, checkpoints, cache) -> None:
    """Promised for equal logits. In these precisions a batch changes them by less than lies between tokens that come in question
    (torch's bf16 products round differently for other numbers of rows).
    """
    shard = load(checkpoints("qwen3"), cache, precision=precision)
    mine = Sampling(temperature=0.8, seed=1234, **sampling)
    alone = [one.token for one in answer(shard, PROMPT, 20, mine)]
    assert len(set(alone)) > 5
    assert [one.token for one in answer(shard, PROMPT, 20, Sampling(temperature=0.8, seed=1235, **sampling))] != alone

    together = Runner(shard, chunk=4)
    others = [together.add([7 * n + 3, 11, 90 - n], 30, Sampling(temperature=1.0, seed=n)) for n in range(5)]
    together.step()
    wanted = together.add(PROMPT, 20, mine)
    together.step()
    others += [together.add([7 * n + 3, 15, 80 - n] * 3, 25) for n in range(3)]
    texts = together.finish()
    assert len(others) == 8
    assert texts[wanted] == alone

    if precision != "fp32":
        return
    resumed = Runner(shard)  # after a preemption: what was generated is computed again as if it were prompt
    number = resumed.add([*PROMPT, *alone[:9]], 11, mine)
    resumed.preempted_after(number, alone[:9])
    assert resumed.finish()[number] == alone[9:]
