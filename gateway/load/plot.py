"""A run as a picture: how long requests took, and tokens and errors over its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.load.report import Outcome, by_second


def plot(outcomes: Sequence[Outcome], elapsed_s: float, title: str, file: Path) -> None:
    """A PNG, by matplotlib (extra `chart`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    times, speed = figure.subplots(2, 1)
    done = [outcome for outcome in outcomes if outcome.ok]
    for name, values in (
        ("first token", [outcome.first_s for outcome in done]),
        ("whole request", [outcome.total_s for outcome in done]),
    ):
        ordered = sorted(values)
        times.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=name)
    times.set(title=title, xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    times.legend()
    tokens, errors = by_second(outcomes, elapsed_s)
    speed.step(range(len(tokens)), tokens, where="post", label="tokens of answers that ended")
    if any(errors):
        speed.step(range(len(errors)), errors, where="post", label="errors", color="red")
    speed.set(xlabel="second of the run", ylabel="a second", ylim=(0, None))
    speed.legend()
    figure.savefig(file, dpi=110)
