"""One choice, from ids to deltas: nothing of it may depend on how the frames came (rule 17)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.proto.pool_pb2 import Logprob
from gateway.servers.choice_stream import ChoiceDelta, ChoiceStream
from gateway.servers.request import GenerationRequest
from gateway.text.model_text import ModelText

EOS = 2


@pytest.fixture(scope="module")
def text(byte_level: Path) -> ModelText:
    return ModelText("m", byte_level, eos_ids=(EOS,), max_context=256)


def run(text: ModelText, request: GenerationRequest, chunks: list[list[int]]) -> tuple[ChoiceDelta, list[ChoiceDelta], int]:
    """The whole of a choice, its deltas, and its count. A stop string ends it as it does in a generation."""
    stream = ChoiceStream(0, request, text, [])
    deltas = []
    for chunk in chunks:
        logprobs = [Logprob(logprob=-float(token)) for token in chunk] if request.logprobs is not None else []
        if (delta := stream.take(chunk, logprobs)) is not None:
            deltas.append(delta)
        if stream.finished:
            break
    if (delta := stream.end("length", -1)) is not None:
        deltas.append(delta)
    whole = ChoiceDelta(0)
    for delta in deltas:
        whole.extend(delta)
    return whole, deltas, stream.completion_tokens


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_framing_gives_the_same_choice(text: ModelText, data: st.DataObject) -> None:
    """rule 17."""
    tokens = st.integers(0, text.vocabulary_size - 1).filter(lambda token: token != EOS)
    ids = data.draw(st.lists(tokens, min_size=1, max_size=15))
    full = text.decode(ids, skip_special_tokens=True)
    places = st.integers(0, max(0, len(full) - 1))
    stops = []
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(places)
        stops.append(full[start : start + data.draw(st.integers(1, 4))] or "x")
    request = GenerationRequest("m", "id", stop=stops, return_token_ids=True, logprobs=0)
    cuts = data.draw(st.lists(st.integers(1, 4), max_size=15))
    chunks, rest = [], ids
    for cut in cuts:
        chunks.append(rest[:cut])
        rest = rest[cut:]
    chunks = [chunk for chunk in [*chunks, rest] if chunk]

    whole, deltas, count = run(text, request, chunks)
    once, _, count_once = run(text, request, [ids])
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason) == (
        once.text,
        once.token_ids,
        once.finish_reason,
        once.stop_reason,
    )
    assert count == count_once
    # Ids and logprobs stay together, in order, and none is given before its text.
    assert [entry.token_id for entry in whole.logprobs] == whole.token_ids == ids[: len(whole.token_ids)]
    assert not any(stop in whole.text for stop in stops)
    if not stops:
        assert full in (whole.text, whole.text + "\ufffd")  # the library marks what is no whole character at the end
        assert (whole.token_ids, count) == (ids, len(ids))
        plain, _, _ = run(text, GenerationRequest("m", "id"), chunks)
        assert plain.text == whole.text
    offsets = [entry.offset for entry in whole.logprobs]
    assert offsets == [entry.offset for entry in once.logprobs][: len(offsets)]
    assert offsets == sorted(offsets)
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert once.text.startswith(shown)


def test_an_end_of_sequence_token_is_no_text(text: ModelText) -> None:
    for request in (GenerationRequest("m", "id"), GenerationRequest("m", "id", return_token_ids=True)):
        stream = ChoiceStream(0, request, text, [])
        delta = stream.take([50, EOS], [])
        assert delta is not None
        last = stream.end("stop", EOS)
        assert last is not None
        assert delta.text == text.decode([50], skip_special_tokens=True)
        assert (last.finish_reason, last.stop_reason, stream.completion_tokens) == ("stop", str(EOS), 2)
        assert delta.token_ids + last.token_ids == ([50] if request.return_token_ids else [])
