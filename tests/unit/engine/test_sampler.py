"""Sampling: filters, penalties, seeds and log-probabilities, one row at a time and in mixed batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.base import DamagedModelError
from workers.engines.torch.noise import gumbel, gumbel_rows, keys
from workers.engines.torch.sampler import SampleState, argmax, sample
from workers.messages import NewSequence, Sampling

VOCABULARY = 40
LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05] + [1e-9] * (VOCABULARY - 5)))


class Given:
    """A head whose hidden states are the logits."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.vocabulary = vocabulary

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def argmax(self, hidden: torch.Tensor, noise: Sequence[torch.Tensor | None]) -> list[int]:
        return argmax(hidden, noise)


def state(position: int = 0, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **options) -> SampleState:
    made = SampleState.start(NewSequence(Sampling(**options), generated, prompt))
    made.position += position
    return made


def draw(count: int, logits: torch.Tensor = LOGITS, **options) -> Counter[int]:
    """Tokens of `count` seeds."""
    states = [state(seed=seed, **options) for seed in range(count)]
    tokens = sample(Given(logits.shape[-1]), logits.repeat(count, 1), list(range(count)), states)
    return Counter(one.token for one in tokens)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draw(20) == {0: 20}


def test_frequencies_follow_the_distribution() -> None:
    counts = draw(4000, temperature=1.0)
    for token, wanted in enumerate((0.4, 0.3, 0.15, 0.1, 0.05)):
        assert counts[token] / 4000 == pytest.approx(wanted, abs=0.03)


def test_temperature_sharpens() -> None:
    counts = draw(2000, temperature=0.5)
    assert counts[0] / 2000 == pytest.approx(0.16 / (0.16 + 0.09 + 0.0225 + 0.01 + 0.0025), abs=0.03)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.69}, {0, 1}),  # 0.4 is not enough, 0.7 is
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),  # never empty
        ({"min_p": 0.3}, {0, 1, 2}),  # 0.12 of the most likely 0.4
        ({"top_k": 3, "top_p": 0.45}, {0}),  # of the 0.85 that top-k left, 0.4 is 0.47
        ({"top_p": 0.95, "min_p": 0.5}, {0, 1}),
    ],
)
def test_filters_keep_exactly_what_they_promise(options, kept) -> None:
    assert set(draw(3000, temperature=1.0, **options)) == kept


def test_top_p_of_a_flat_distribution_looks_beyond_the_first_candidates() -> None:
    """With more tokens in the mass than the quick path looks at, the whole vocabulary is sorted."""
    flat = torch.zeros(4096)
    counts = draw(3000, flat, temperature=1.0, top_p=0.9)
    assert len(counts) > 1500
    few = draw(300, flat, temperature=1.0, top_p=0.01)
    assert len(few) <= 41


def test_same_seed_same_token_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 500, generator=generator)
    options = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3}, {"temperature": 1.0, "top_k": 20, "min_p": 0.01}] * 3

    def states() -> list[SampleState]:
        return [state(position=row, seed=row * 77, **options[row]) for row in range(9)]

    together = [one.token for one in sample(Given(rows.shape[1]), rows, list(range(9)), states())]
    alone = [sample(Given(rows.shape[1]), rows[row : row + 1], [row], [states()[row]])[0].token for row in range(9)]
    reverse = [one.token for one in sample(Given(rows.shape[1]), rows.flip(0), list(range(9)), states()[::-1])][::-1]
    assert together == alone == reverse


def test_positions_of_one_seed_differ_and_a_preempted_sequence_goes_on_where_it_was() -> None:
    first = state(seed=5, temperature=1.0)
    tokens = [sample(Given(), LOGITS.unsqueeze(0), [1], [first])[0].token for _ in range(40)]
    assert len(set(tokens)) > 2
    resumed = state(seed=5, temperature=1.0, generated=tuple(tokens[:25]))
    assert [sample(Given(), LOGITS.unsqueeze(0), [1], [resumed])[0].token for _ in range(15)] == tokens[25:]


@given(st.integers(min_value=-(2**63), max_value=2**64 - 1), st.integers(min_value=0, max_value=2**31))
@settings(max_examples=50, deadline=None)
def test_cpu_and_gpu_compute_one_noise_and_it_is_finite(seed: int, position: int) -> None:
    low, high = keys(seed, position)
    here = gumbel(seed, position, np.arange(500, dtype=np.uint32))
    there = gumbel_rows(torch.tensor([low]), torch.tensor([high]), 500)[0]
    assert torch.equal(here, there)
    assert bool(here.isfinite().all())


def test_the_noise_is_gumbels_over_tokens_positions_and_seeds() -> None:
    """By deciles, and next to each other independent; the largest of 2^22 has the tail's right size (mean 15.8)."""
    ids = np.arange(4000, dtype=np.uint32)
    one = np.array([0], dtype=np.uint32)
    over_tokens = gumbel(7, 3, ids)
    over_positions = torch.cat([gumbel(7, position, one) for position in range(4000)])
    over_seeds = torch.cat([gumbel(seed, 3, one) for seed in range(4000)])
    for values in (over_tokens, over_positions, over_seeds):
        uniform = torch.exp(-torch.exp(-values.double()))
        counts = torch.histc(uniform, 10, 0, 1)
        assert float((counts - 400).abs().max()) < 90
        assert abs(float(torch.corrcoef(torch.stack((uniform[1:], uniform[:-1])))[0, 1])) < 0.06
    assert 12 < float(gumbel(1, 1, np.arange(2**22, dtype=np.uint32)).max()) < 23


EDGES = [0.0, -1.0, 5e-324, 1e-38, 1e-9, 1e-4, 1.0, 1e30, math.inf, -math.inf, math.nan]


@given(
    temperature=st.sampled_from(EDGES),
    top_p=st.sampled_from(EDGES),
    min_p=st.sampled_from(EDGES),
    top_k=st.sampled_from([-5, 0, 1, 39, 40, 41, 2**31]),
    penalty=st.sampled_from(EDGES),
    frequency=st.sampled_from(EDGES),
    logprobs=st.sampled_from([-1, 0, 3, 1000]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_parameters_a_token_of_the_vocabulary_is_drawn(
    temperature, top_p, min_p, top_k, penalty, frequency, logprobs
) -> None:
    drawn = state(
        generated=(0, 1),
        prompt=(2,),
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        repetition_penalty=penalty,
        frequency_penalty=frequency,
        logprobs=logprobs,
    )
    logits = torch.cat((LOGITS[:-1], torch.tensor([-math.inf])))  # some heads mask a token so
    sampled = sample(Given(), logits.unsqueeze(0), [1], [drawn])[0]
    assert 0 <= sampled.token < VOCABULARY - 1
    assert math.isfinite(sampled.logprob)


@pytest.mark.parametrize("temperature", [1e-5, 5e-324, -1.0, math.nan])
def test_temperatures_below_the_floor_are_greedy(temperature: float) -> None:
    assert draw(50, temperature=temperature) == {0: 50}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 1}, {"temperature": 0.5, "top_k": 3}])
def test_logits_that_are_no_numbers_are_an_error(bad: float, options) -> None:
    rows = torch.stack((LOGITS, LOGITS))
    rows[1, 7] = bad
    with pytest.raises(DamagedModelError, match="NaN"):
        sample(Given(rows.shape[1]), rows, [1, 2], [state(**options), state(**options)])


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = torch.tensor([3.0, 2.9, -1.0, 2.5])
    penalized = state(prompt=(0,), repetition_penalty=1.5)
    assert sample(Given(), logits.unsqueeze(0), [1], [penalized])[0].token == 1
    assert sample(Given(), logits.unsqueeze(0), [1], [penalized])[0].token == 3  # now 1 was seen too
    below_zero = state(prompt=(0,), repetition_penalty=2.0)
    assert sample(Given(), torch.tensor([[-1.0, -1.5]]), [1], [below_zero])[0].token == 1  # -1 becomes -2


def test_presence_penalty_is_paid_once_and_frequency_penalty_each_time() -> None:
    logits = torch.tensor([[1.0, 0.8]])
    assert sample(Given(), logits, [1], [state(generated=(0, 0, 0), presence_penalty=0.1)])[0].token == 0
    assert sample(Given(), logits, [1], [state(generated=(0,), presence_penalty=0.3)])[0].token == 1
    assert sample(Given(), logits, [1], [state(generated=(0,), frequency_penalty=0.1)])[0].token == 0
    assert sample(Given(), logits, [1], [state(generated=(0, 0, 0), frequency_penalty=0.1)])[0].token == 1
    assert sample(Given(), logits, [1], [state(prompt=(0,), frequency_penalty=5.0)])[0].token == 0  # of the answer only


def test_log_probabilities_are_the_models_own() -> None:
    one = sample(Given(), LOGITS.unsqueeze(0), [1], [state(temperature=0.0, logprobs=3, generated=(0,), presence_penalty=9.0)])[0]
    assert one.token == 1  # the penalty moved the choice, not what is reported
    assert one.logprob == pytest.approx(math.log(0.3), abs=1e-4)
    assert one.alternative_ids == (0, 1, 2)
    assert one.alternative_logprobs == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.15)], abs=1e-4)
    only_chosen = sample(Given(), LOGITS.unsqueeze(0), [1], [state(logprobs=0)])[0]
    assert (only_chosen.alternative_ids, only_chosen.logprob) == ((), pytest.approx(math.log(0.4), abs=1e-4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            top_p=st.sampled_from([0.05, 0.5, 1.0]),
            top_k=st.sampled_from([0, 1, 5, 1000]),
            min_p=st.sampled_from([0.0, 0.2, 1.0]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            presence_penalty=st.sampled_from([0.0, 0.5]),
            seed=st.integers(0, 2**63),
            logprobs=st.sampled_from([-1, 0, 2]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_mixture_gives_every_sequence_one_valid_token(samplings: list[Sampling]) -> None:
    rows = torch.randn(len(samplings), VOCABULARY, generator=torch.Generator().manual_seed(1))
    states = [SampleState.start(NewSequence(sampling, (1, 2), (3,))) for sampling in samplings]
    found = sample(Given(rows.shape[1]), rows, [10 + row for row in range(len(samplings))], states)
    assert [one.sequence for one in found] == [10 + row for row in range(len(samplings))]
    for one, sampling, after in zip(found, samplings, states, strict=True):
        assert 0 <= one.token < VOCABULARY
        assert after.position == 3
        assert len(one.alternative_ids) == max(sampling.logprobs, 0)
        if sampling.min_p == 1.0 and sampling.repetition_penalty == 1.0 and sampling.presence_penalty == 0.0:
            assert one.token == int(rows[found.index(one)].argmax())
