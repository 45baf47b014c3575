"""Traces: public formats, and drawn ones."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, stdev

import pytest

from gateway.cli.traces import Arrival, TraceError, generate, read, read_azure, read_burstgpt, read_servegen, scaled, write

# A few lines of each format. Azure LLM inference trace 2023, code service (CC-BY; Patel et al., "Splitwise", ISCA 2024).
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
""".splitlines()
# The layout of BurstGPT (Wang et al., 2024); the values are made up.
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
""".splitlines()
# Two windows of ServeGen's m-small (Apache-2.0; arXiv 2505.09999), with a shortened dataset.
SERVEGEN = ["3000,0.25,0.5,Gamma,4.0,1.0", "3600,0,0,,0,0"]
LENGTHS = '{"0": {"input_tokens": "{618: 0.25, 1221: 0.75}", "output_tokens": "{7: 1.0}"}}'


def test_azure_times_begin_at_zero() -> None:
    trace = read_azure(AZURE, "code")
    assert trace[0] == Arrival(0.0, "code", 4808, 10)
    assert trace[2].time_s == pytest.approx(0.098189)


def test_burstgpt_names_its_models_and_failed_requests_are_left_out() -> None:
    assert read_burstgpt(BURSTGPT, {"ChatGPT": "chat"}) == [Arrival(5, "chat", 472, 18), Arrival(118, "gpt-4", 417, 276)]


def test_servegen_windows_give_their_rate_and_lengths() -> None:
    trace = read_servegen({"m": (SERVEGEN, LENGTHS)}, seed=1)
    assert 100 < len(trace) < 200  # 600 s at 0.25 a second
    assert all(3000 <= arrival.time_s < 3600 for arrival in trace)
    assert {arrival.prompt_tokens for arrival in trace} == {618, 1221}
    assert sum(arrival.prompt_tokens == 1221 for arrival in trace) > len(trace) / 2
    assert trace == read_servegen({"m": (SERVEGEN, LENGTHS)}, seed=1)


def test_our_own_format_is_read_as_it_is_written() -> None:
    trace = generate(["a", "b"], 20, 2, seed=3)[:20]
    again = read(list(write(trace)))
    assert again == sorted(arrival._replace(time_s=round(arrival.time_s, 3)) for arrival in trace)


@pytest.mark.parametrize("line", ["x,m,1,1", "1,,1,1", "1,m,0,1", "-1,m,1,1", "1,m,,1"])
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        read(["time_s,model,prompt_tokens,output_tokens", line])


def test_drawn_traces_follow_zipf_their_rate_and_their_seed() -> None:
    trace = generate(["a", "b", "c", "d"], 2000, 10, seed=5)
    assert trace == generate(["a", "b", "c", "d"], 2000, 10, seed=5)
    assert trace != generate(["a", "b", "c", "d"], 2000, 10, seed=6)
    assert len(trace) == pytest.approx(20_000, rel=0.05)
    counts = [sum(arrival.model == name for arrival in trace) for name in "abcd"]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert mean(arrival.output_tokens for arrival in trace) == pytest.approx(128, rel=0.05)


def test_days_rise_and_fall_and_bursts_are_bursts() -> None:
    day = generate(["m"], 1000, 10, day_s=1000, swing=0.9, seed=1)
    noon = sum(400 <= arrival.time_s < 600 for arrival in day)
    night = sum(arrival.time_s < 100 or arrival.time_s >= 900 for arrival in day)
    assert noon > 5 * night
    variations = []
    for variation in (1.0, 3.0):
        times = [arrival.time_s for arrival in generate(["m"], 3000, 5, variation=variation, seed=2)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        variations.append(stdev(gaps) / mean(gaps))
    assert variations[0] == pytest.approx(1, rel=0.1)
    assert variations[1] == pytest.approx(3, rel=0.2)


def test_what_if_a_model_is_asked_twice_as_much() -> None:
    trace = generate(["a", "b"], 500, 4, seed=1)
    doubled = scaled(trace, "a", 2)
    of_a = sum(arrival.model == "a" for arrival in trace)
    assert sum(arrival.model == "a" for arrival in doubled) == 2 * of_a
    assert [arrival for arrival in doubled if arrival.model == "b"] == [arrival for arrival in trace if arrival.model == "b"]
    assert sum(arrival.model == "a" for arrival in scaled(trace, "a", 0.5)) == pytest.approx(of_a / 2, rel=0.15)
