"""The accuracy gate: its sums, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import gateway.check
from gateway.api.errors import YardError
from gateway.api.proto import inference_pb2 as inference
from gateway.check.accuracy import Limits, Place, divergence, judge, log_probability
from gateway.check.measure import CheckSet, compare, read_set

EVEN = {1: math.log(0.5), 2: math.log(0.5)}
SKEWED = {1: math.log(0.9), 2: math.log(0.1)}


def test_divergence_is_zero_of_the_same_and_the_textbook_sum_of_others() -> None:
    assert divergence(EVEN, EVEN) == 0
    assert divergence(EVEN, SKEWED) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    partly = {1: math.log(0.5)}
    assert divergence(partly, {1: math.log(0.25)}) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


def test_a_token_that_is_not_named_shares_what_is_left() -> None:
    assert log_probability({1: math.log(0.6)}, 5, 5) == pytest.approx(math.log(0.4 / 4))


def test_each_limit_is_a_failure_of_its_own() -> None:
    places = [Place(1, EVEN, {1: math.log(0.1), 2: math.log(0.9)})] * 4
    right = [(True, True), (True, False)]
    report = judge(places, 10, right, Limits(top1=0.9, kl=0.05, perplexity=0.05, tasks=0.02))
    assert [failure.split()[0] for failure in report.failures] == ["top-1", "KL", "perplexity", "50.0%"]
    assert judge(places, 10, right, Limits(top1=0, kl=9, perplexity=9, tasks=1)).passed
    same = judge([Place(1, SKEWED, SKEWED)], 10, [(True, True)], Limits(top1=1, kl=0, perplexity=0, tasks=0))
    assert same.passed
    assert same.perplexity_reference == pytest.approx(1 / 0.9)


class Served:
    """Two models that differ at every fifth place."""

    def tokenize(self, request: inference.TokenizeRequest) -> inference.TokenizeResponse:
        return inference.TokenizeResponse(ids=[ord(letter) for letter in request.text])

    def generate(self, request: inference.GenerateRequest, timeout_s: float) -> inference.GenerateResponse:
        del timeout_s
        if request.WhichOneof("input") == "prompt":
            text = "It is Paris" if request.model == "reference" else "Lyon"
            return inference.GenerateResponse(choices=[inference.Choice(text=text)])
        first = 7 if request.model == "candidate" and len(request.prompt_ids.ids) % 5 == 0 else 6
        other = inference.TokenLogprob(token_id=13 - first, logprob=math.log(0.4))
        likely = inference.TokenLogprob(token_id=first, logprob=math.log(0.6), alternatives=[other])
        return inference.GenerateResponse(choices=[inference.Choice(logprobs=[likely])])


def test_models_are_asked_at_the_same_places(tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text('{"prompt": "The capital of France is", "answer": "paris"}\n')
    (tmp_path / "texts").write_text("x" * 28 + "\n\n" + "y" * 8)
    chosen = read_set(tmp_path / "texts", tmp_path / "tasks")
    seen: list[int] = []
    report = compare(
        Served(), "reference", "candidate", chosen, Limits(), places=100, progress=lambda done, _of: seen.append(done)
    )
    assert report.places == 20
    assert report.top1_agreement == 0.8
    assert (report.tasks_reference, report.tasks_candidate) == (1.0, 0.0)
    assert seen[-1] == 2 * 20 + 2


def test_models_with_other_tokenizers_cannot_be_compared() -> None:
    class Other(Served):
        def tokenize(self, request: inference.TokenizeRequest) -> inference.TokenizeResponse:
            return inference.TokenizeResponse(ids=[1] if request.model == "candidate" else [2])

    with pytest.raises(YardError, match="do not tokenize alike"):
        compare(Other(), "reference", "candidate", CheckSet(("text",), ()), Limits(), places=3)


def test_the_set_that_comes_with_it_is_readable_and_a_bad_line_is_named(tmp_path: Path) -> None:
    own = Path(gateway.check.__file__).parent
    chosen = read_set(own / "texts.txt", own / "tasks.jsonl")
    assert len(chosen.texts) >= 8
    assert len(chosen.tasks) >= 20
    (tmp_path / "tasks").write_text('{"prompt": "a"}')
    with pytest.raises(YardError, match="tasks:1: a task is a JSON object"):
        read_set(own / "texts.txt", tmp_path / "tasks")
