"""Arrivals of requests over time: what a simulation replays. Reads public formats and draws traces. Lines in, no files.

Formats (each importer says where its columns come from):
- ours: CSV with a header `time_s,model,prompt_tokens,output_tokens`;
- Azure LLM inference traces 2023/2024 (CC-BY, Patel et al., "Splitwise", ISCA 2024): TIMESTAMP,ContextTokens,GeneratedTokens;
- BurstGPT (Wang et al., 2024): Timestamp,Model,Request tokens,Response tokens,...;
- ServeGen (Apache-2.0, arXiv 2505.09999): windows of rate and burstiness, and distributions of lengths, a client each.
"""

from __future__ import annotations

import csv
import json
import random
from ast import literal_eval
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from math import cos, pi

from placement.types import Arrival


class TraceError(ValueError):
    """Names the line and what is wrong with it."""


def read(lines: Iterable[str]) -> list[Arrival]:
    """Our own CSV."""
    rows = csv.DictReader(lines)
    found = [
        _arrival(number, row, "time_s", row.get("model") or "", "prompt_tokens", "output_tokens")
        for number, row in enumerate(rows, 2)
    ]
    return sorted(found)


def write(trace: Iterable[Arrival]) -> Iterator[str]:
    yield "time_s,model,prompt_tokens,output_tokens"
    for arrival in trace:
        yield f"{arrival.time_s:.3f},{arrival.model},{arrival.prompt_tokens},{arrival.output_tokens}"


def read_azure(lines: Iterable[str], model: str) -> list[Arrival]:
    """One service, hence one model. Times are wall-clock times; the first is second 0."""
    found: list[Arrival] = []
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        except (KeyError, ValueError) as error:
            raise TraceError(f"line {number}: no TIMESTAMP as 2023-11-16 18:17:03.9799600 ({error})") from error
        first = first or when
        row = {**row, "time_s": str((when - first).total_seconds())}
        found.append(_arrival(number, row, "time_s", model, "ContextTokens", "GeneratedTokens"))
    return sorted(found)


def read_burstgpt(lines: Iterable[str], names: Mapping[str, str] | None = None) -> list[Arrival]:
    """`names`: from the trace's models ("ChatGPT", "GPT-4") to ours. Failed requests (no response tokens) are left out."""
    found = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        model = row.get("Model") or ""
        if row.get("Response tokens") in ("0", "", None):
            continue
        named = (names or {}).get(model, model.lower())
        found.append(_arrival(number, row, "Timestamp", named, "Request tokens", "Response tokens"))
    return sorted(found)


def read_servegen(
    clients: Mapping[str, tuple[Iterable[str], str]], seed: int = 0, until_s: float = float("inf")
) -> list[Arrival]:
    """model -> (lines of chunk-N-trace.csv, text of chunk-N-dataset.json): each client is the load of one model.

    A window is `start, requests a second, coefficient of variation, distribution, its parameters`. Intervals are drawn from
    the gamma distribution of the window's rate and variation; lengths from the dataset's distributions of that time.
    """
    found: list[Arrival] = []
    for model in sorted(clients):
        windows, dataset = clients[model]
        draw = random.Random(f"{seed}:{model}")
        lengths = _Lengths(dataset)
        rows = [row for row in csv.reader(windows) if row]
        for number, row in enumerate(rows):
            start, rate = float(row[0]), float(row[1])
            end = float(rows[number + 1][0]) if number + 1 < len(rows) else start + 600.0
            if rate > 0 and start < until_s:
                variation = float(row[2]) or 1.0
                found += (
                    Arrival(time, model, *lengths.draw(time, draw))
                    for time in _gamma_times(draw, start, min(end, until_s), rate, variation)
                )
    return sorted(found)


_Table = tuple[list[int], list[float]]  # values, and their shares added up


class _Lengths:
    """Prompt and output lengths by time, from a ServeGen dataset: {"0": {"input_tokens": "{618: 0.003, ...}", ...}, ...}."""

    def __init__(self, text: str) -> None:
        self._windows: list[tuple[float, list[_Table]]] = []
        for start, window in json.loads(text).items():
            tables: list[_Table] = []
            for key in ("input_tokens", "output_tokens"):
                shares: dict[int, float] = literal_eval(window[key]) if isinstance(window[key], str) else window[key]
                tables.append((list(map(int, shares)), list(accumulate(shares.values()))))
            if all(table[0] for table in tables):
                self._windows.append((float(start), tables))
        if not self._windows:
            raise TraceError("the dataset has no window with input_tokens and output_tokens")
        self._windows.sort(key=lambda window: window[0])
        self._starts = [window[0] for window in self._windows]

    def draw(self, time_s: float, draw: random.Random) -> tuple[int, int]:
        _, (prompts, outputs) = self._windows[max(bisect_left(self._starts, time_s) - 1, 0)]
        return _pick(prompts, draw), _pick(outputs, draw)


def _pick(table: _Table, draw: random.Random) -> int:
    values, sums = table
    return max(values[min(bisect_left(sums, draw.random() * sums[-1]), len(values) - 1)], 1)


def generate(
    models: Sequence[str],
    seconds: float,
    requests_per_s: float,
    *,
    seed: int = 0,
    zipf: float = 1.0,
    day_s: float = 86400.0,
    swing: float = 0.0,
    variation: float = 1.0,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
) -> list[Arrival]:
    """Popularity by Zipf's law (the n-th model gets 1 / n^zipf), a day's rise and fall (`swing` 0: none, 1: from nothing to
    twice the mean; lowest at the beginning), bursts (`variation` of the intervals; 1: as they come by chance, 3: in bursts).
    Lengths are log-normal around their means, sigma 0.7, at most 8 times them.
    """
    shares = [1 / (rank + 1) ** zipf for rank in range(len(models))]
    found: list[Arrival] = []
    for model, share in zip(models, shares, strict=True):
        draw = random.Random(f"{seed}:{model}")
        rate = requests_per_s * share / sum(shares)
        # Thinned from the day's highest rate, so that bursts keep their shape.
        for time in _gamma_times(draw, 0.0, seconds, rate * (1 + swing), variation):
            if draw.random() * (1 + swing) <= 1 - swing * cos(2 * pi * time / day_s):
                found.append(Arrival(time, model, _length(draw, prompt_tokens), _length(draw, output_tokens)))
    return sorted(found)


def scaled(trace: Sequence[Arrival], model: str, factor: float, seed: int = 0) -> list[Arrival]:
    """What if one model is asked `factor` times as much: its requests repeated or left out at random, copies up to a second
    off so that they do not come as pairs.
    """
    draw = random.Random(f"{seed}:{model}:{factor}")
    found: list[Arrival] = []
    for arrival in trace:
        if arrival.model != model:
            found.append(arrival)
            continue
        copies = int(factor) + (draw.random() < factor % 1)
        found += [arrival] * min(copies, 1)
        found += (arrival._replace(time_s=max(0.0, arrival.time_s + draw.uniform(-1, 1))) for _ in range(copies - 1))
    return sorted(found)


def _gamma_times(draw: random.Random, start: float, end: float, rate: float, variation: float) -> Iterator[float]:
    """Times with `rate` a second whose intervals have this coefficient of variation."""
    shape = 1 / variation**2
    scale = 1 / (rate * shape)
    time = start + draw.gammavariate(shape, scale) * draw.random()
    while time < end:
        yield time
        time += draw.gammavariate(shape, scale)


def _length(draw: random.Random, mean: int) -> int:
    sigma = 0.7
    drawn = mean * draw.lognormvariate(-sigma * sigma / 2, sigma)
    return max(1, min(round(drawn), 8 * mean))


def _arrival(number: int, row: Mapping[str, str], time: str, model: str, prompt: str, output: str) -> Arrival:
    try:
        arrival = Arrival(float(row[time]), model, int(float(row[prompt])), max(int(float(row[output])), 1))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"line {number}: {error!r}; expected columns {time}, {prompt}, {output}") from error
    if not model or arrival.time_s < 0 or arrival.prompt_tokens < 1:
        raise TraceError(f"line {number}: no model, a negative time or an empty prompt")
    return arrival
