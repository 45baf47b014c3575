"""Answers held to a JSON schema, whatever the logits say."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.api.json_grammar import BYTES_A_TOKEN, grammar_tokenizer
from workers.engines.torch.constraint import Constraint, Constraints
from workers.engines.torch.cuda.draw import DrawState, draw
from workers.engines.torch.sampler import SampleState, argmax, sample
from workers.messages import NewSequence, SampledToken, Sampling

EOS = 0
VOCABULARY = 300  # padded: more logits than the tokenizer has tokens
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
)
sequences = count(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {"<eos>": EOS} | {piece: i + 1 for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def constraints(directory: Path) -> Constraints:
    return Constraints(lambda: grammar_tokenizer(directory, [EOS]))


def begun(constraints: Constraints, schema: str = SCHEMA, generated: Sequence[int] = ()) -> Constraint:
    sequence = next(sequences)
    constraints.prepare(sequence, schema)()
    return constraints.begin(sequence, generated)


class Head:
    vocabulary = VOCABULARY

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def argmax(self, hidden: torch.Tensor, noise: Sequence[torch.Tensor | None]) -> list[int]:
        return argmax(hidden, noise)


State = SampleState | DrawState
Sampler = tuple[Callable[[Sampling, Constraint | None], State], Callable[[torch.Tensor, list[State]], Sequence[SampledToken]]]


def _cpu_state(sampling: Sampling, constraint: Constraint | None) -> State:
    made = SampleState.start(NewSequence(sampling))
    made.constraint = constraint
    return made


def _gpu_state(sampling: Sampling, constraint: Constraint | None) -> State:
    made = DrawState.start(NewSequence(sampling), VOCABULARY, torch.device("cpu"))
    made.constraint = constraint
    return made


SAMPLERS: dict[str, Sampler] = {
    "cpu": (_cpu_state, lambda rows, states: sample(Head(), rows, list(range(len(states))), states)),  # pyright: ignore[reportArgumentType]
    "gpu": (_gpu_state, lambda rows, states: draw(rows, rows.argmax(-1), states).sampled(list(range(len(states))), states)),  # pyright: ignore[reportArgumentType]
}


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """As on CPU ranks, and as on GPUs (computed here without one)."""
    return SAMPLERS[request.param]


def answers(sampler: Sampler, states: list[State], steps: int = 60) -> list[list[int]]:
    """By random logits, in which what no JSON begins with is likely; the last token is told with each step, as drivers do."""
    random = np.random.default_rng(3)
    found: list[list[int]] = [[] for _ in states]
    for _ in range(steps):
        rows = torch.from_numpy(random.normal(0, 4, (1, VOCABULARY)).astype(np.float32)).repeat(len(states), 1)
        for row, one in enumerate(sampler[1](rows, states)):
            constraint = states[row].constraint
            assert not one.error or EOS in found[row]
            found[row].append(one.token)
            if constraint is not None:
                constraint.advance([one.token])
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=2.0, top_p=0.9, top_k=40),
        Sampling(temperature=1.0, min_p=0.1, logprobs=1),
        Sampling(presence_penalty=1.0),
    ],
)
def test_answers_follow_the_schema_and_end_where_it_ends(
    sampler: Sampler, constraints: Constraints, tokenizer: Tokenizer, sampling: Sampling
) -> None:
    start = sampler[0]
    held, twin, unheld = answers(
        sampler, [start(sampling, begun(constraints)), start(sampling, begun(constraints)), start(Sampling(), None)]
    )
    answer = json.loads(tokenizer.decode(held[: held.index(EOS)]))
    assert answer.keys() == {"ok", "kind"}
    assert isinstance(answer["ok"], bool)
    assert answer["kind"] in ("a", "b")
    assert twin[: twin.index(EOS)] == held[: held.index(EOS)]  # ranks of a group choose alike
    assert unheld == answers(sampler, [start(Sampling(), None)])[0]


def test_after_a_preemption_it_goes_on_where_it_was(constraints: Constraints, tokenizer: Tokenizer) -> None:
    before = tuple(tokenizer.encode('{"ok": true').ids)
    (rest,) = answers(SAMPLERS["cpu"], [_cpu_state(Sampling(), begun(constraints, generated=before))])
    assert json.loads(tokenizer.decode([*before, *rest[: rest.index(EOS)]]))["ok"] is True


def test_what_cannot_be_followed_ends_that_sequence_alone(
    sampler: Sampler, constraints: Constraints, tokenizer: Tokenizer
) -> None:
    strayed = begun(constraints, generated=tokenizer.encode("no").ids)
    states = [sampler[0](Sampling(), strayed), sampler[0](Sampling(), begun(constraints))]
    bad, good = sampler[1](torch.zeros(2, VOCABULARY), states)
    assert "cannot follow its JSON schema" in bad.error
    assert not good.error


def test_a_schema_that_cannot_be_compiled_says_why(constraints: Constraints) -> None:
    sequence = next(sequences)
    with pytest.raises(ValueError, match="Invalid type: nonsense"):
        constraints.prepare(sequence, '{"type": "nonsense"}')()
    with pytest.raises(ValueError, match="has not compiled"):
        constraints.begin(sequence, ())


def test_one_tokenizer_of_a_content_is_made_when_it_is_first_needed_and_goes_with_the_last_user(directory: Path) -> None:
    made: list[int] = []

    def load() -> object:
        made.append(1)
        return grammar_tokenizer(directory, [EOS, 7])

    one, other = (Constraints(load) for _ in range(2))  # pyright: ignore[reportArgumentType]
    assert (made, one.size_bytes) == ([], 0)
    assert one.prepare(1, SCHEMA)() == other.prepare(2, SCHEMA)() == 257 * BYTES_A_TOKEN
    one.prepare(3, SCHEMA)()
    assert made == [1, 1]
    first = id(grammar_tokenizer(directory, [EOS, 7]))
    assert id(grammar_tokenizer(directory, [7, EOS])) == first
    del one, other
    gc.collect()
    assert grammar_tokenizer(directory, [EOS, 7]).size_bytes == 257 * BYTES_A_TOKEN


def test_a_sequence_that_does_not_begin_is_forgotten(constraints: Constraints) -> None:
    for forgotten in (1001, None):
        constraints.prepare(1001, SCHEMA)()
        constraints.forget(forgotten)
        with pytest.raises(ValueError, match="1001"):
            constraints.begin(1001, ())
