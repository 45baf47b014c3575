"""The storm for a minute. `MODELYARD_STORM_S=300 MODELYARD_STORM_SEED=7` for more; `MODELYARD_STORM_REPORT=FILE` keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from house import House
from storm import Storm

pytestmark = pytest.mark.site

SECONDS = float(os.environ.get("MODELYARD_STORM_S", "60"))
SEED = int(os.environ.get("MODELYARD_STORM_SEED", "1"))


@pytest.mark.timeout(SECONDS + 400)
def test_nothing_hangs_leaks_or_lies_in_a_storm(house: House) -> None:
    """Rules 1, 5, 8, 9, 10, 11, 12 and 13 together, under load."""
    storm = Storm(house, SEED)
    try:
        report = storm.run(SECONDS)
    finally:
        house.yard("route", "switch", "chat", "--to", "smollm2", "--force", server=True)
    print(report.table())
    if file := os.environ.get("MODELYARD_STORM_REPORT"):
        report.write(Path(file))
