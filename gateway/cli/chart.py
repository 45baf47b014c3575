"""The chart of a simulation: memory, switches and SLO over time, as a PNG. Needs matplotlib (extra `chart`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.outcome import Outcome


def draw(outcome: Outcome, title: str, file: Path) -> None:
    from matplotlib.figure import Figure

    times = [sample.time_s for sample in outcome.samples]
    figure = Figure(figsize=(10, 8), layout="constrained")
    memory, switches, slo = figure.subplots(3, 1, sharex=True)
    resident = [sample.resident_bytes / 2**30 for sample in outcome.samples]
    keys = [sample.kv_bytes / 2**30 for sample in outcome.samples]
    memory.stackplot(times, resident, keys, labels=("models, as reserved", "keys and values in use"), alpha=0.8)
    memory.set_ylabel("GiB")
    memory.legend(loc="upper right")
    memory.set_title(title)
    switches.step(times, [sample.switches for sample in outcome.samples], where="post", label="wakes")
    switches.plot(times, [sample.running for sample in outcome.samples], label="requests in the pools", alpha=0.7)
    switches.legend(loc="upper right")
    known = [(sample.time_s, 100 * sample.within_slo) for sample in outcome.samples if sample.within_slo is not None]
    slo.plot([time for time, _ in known], [share for _, share in known], ".", markersize=3)
    slo.set_ylim(-2, 102)
    slo.set_ylabel("% within SLO")
    slo.set_xlabel("s")
    figure.savefig(file, format="png", dpi=110)
