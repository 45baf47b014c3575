"""Tests here that need no whole site use the lone gateway of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "gateway"))
