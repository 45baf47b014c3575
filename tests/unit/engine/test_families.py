"""Every family gives the same greedy tokens as transformers itself, however the work is cut into steps."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import FAMILIES, VOCABULARY, greedy
from shard_runner import Runner, load

COUNT = 24


def prompts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (5, 41, 1, 17)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_same_greedy_tokens_as_transformers(family: str, checkpoints, cache) -> None:
    directory = checkpoints(family)
    wanted = [greedy(directory, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the answers do not depend on the prompts"
    shard = load(directory, cache, precision="fp32")

    single = []
    for prompt in prompts():
        runner = Runner(shard)
        runner.add(prompt, COUNT)
        single.append(runner.finish()[1])
    assert single == wanted

    chunked = Runner(shard, chunk=7)
    in_flight = [chunked.add(prompt, COUNT) for prompt in prompts()[:2]]
    for _ in range(9):  # the others join while these decode
        chunked.step()
    in_flight += [chunked.add(prompt, COUNT) for prompt in prompts()[2:]]
    answers = chunked.finish()
    assert [answers[sequence] for sequence in in_flight] == wanted
