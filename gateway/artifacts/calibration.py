"""The prompts that a quantization is calibrated on: enough of them, of mixed lengths, and not the same ones again and again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gateway.api.errors import invalid

LEAST_PROMPTS = 1000
MOST_DUPLICATES = 0.02  # as a share
LEAST_SPREAD = 3.0  # of the length at the 90th percentile over that at the 10th


@dataclass(frozen=True)
class CalibrationSet:
    prompts: tuple[str, ...]
    digest: str
    duplicates: int
    spread: float


def read_calibration(path: Path) -> CalibrationSet:
    """Lines of JSON with `prompt` (or `text`), or plain lines. YardError says what is wrong with the set."""
    prompts = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(path, number, line))
    if len(prompts) < LEAST_PROMPTS:
        raise invalid(f"{path}: {len(prompts)} prompts, at least {LEAST_PROMPTS} are needed; take them from your own traffic")
    duplicates = len(prompts) - len(set(prompts))
    if duplicates > MOST_DUPLICATES * len(prompts):
        raise invalid(f"{path}: {duplicates} of {len(prompts)} prompts are duplicates, at most {MOST_DUPLICATES:.0%} may be")
    lengths = sorted(map(len, prompts))
    spread = lengths[9 * len(lengths) // 10] / max(1, lengths[len(lengths) // 10])
    if spread < LEAST_SPREAD:
        raise invalid(
            f"{path}: its prompts are of one length (90th percentile {spread:.1f} × the 10th, at least {LEAST_SPREAD:g} × is "
            "wanted); mix short questions with long documents, as your traffic does"
        )
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
    return CalibrationSet(tuple(prompts), digest, duplicates, spread)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise invalid(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise invalid(f"{path}: it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _prompt(path: Path, number: int, line: str) -> str:
    if path.suffix != ".jsonl":
        return line
    try:
        content = json.loads(line)
        return str(content.get("prompt") or content["text"])
    except (ValueError, KeyError, AttributeError) as error:
        raise invalid(f"{path}:{number}: it is no JSON object with `prompt` or `text` ({error!r})") from error
