"""How many requests for one model ended at this gateway, on whatever surface, and what time they took."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    answered: int = 0
    answered_s: float = 0.0
    first_text_s: float = 0.0  # of those answered, from their arrival to their first text
    failed: int = 0
    failed_s: float = 0.0
    last_unix: float = 0.0

    def count(self, took_s: float, first_text_s: float, *, failed: bool) -> None:
        self.last_unix = time.time()
        if failed:
            self.failed += 1
            self.failed_s += took_s
            return
        self.answered += 1
        self.answered_s += took_s
        self.first_text_s += first_text_s
