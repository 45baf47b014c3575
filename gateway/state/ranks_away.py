"""Which ranks of a pool do not run, in words that stay short for many. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.records import PoolRecord

_LISTED = 4


def ranks_away(pool: PoolRecord) -> str:
    """Empty when all run."""
    by_word: dict[str, list[int]] = {}
    for rank in pool.ranks:
        by_word.setdefault(rank.word, []).append(rank.index)
    alive = len(by_word.pop("alive", ()))
    if not by_word:
        return ""
    because = f" ({pool.message})" if pool.message else ""
    if not alive and len(by_word) == 1:
        [word] = by_word
        return f"{'its rank is' if len(pool.ranks) == 1 else f'its {len(pool.ranks)} ranks are'} {word}{because}"
    away = ", ".join(f"{_ranges(indices)} {word}" for word, indices in sorted(by_word.items()))
    return f"{alive} of {len(pool.ranks)} ranks run, {away}{because}"


def _ranges(indices: Sequence[int]) -> str:
    """`r0-r7, r9`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    shown = [f"r{run[0]}" if len(run) == 1 else f"r{run[0]}-r{run[-1]}" for run in runs[:_LISTED]]
    left = sum(len(run) for run in runs[_LISTED:])
    return ", ".join(shown) + (f" and {left} more" if left else "")
