"""One step's tokens, as arrays on the host and on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Span:
    """`count` tokens of one sequence, at positions start.. of it."""

    count: int
    start: int
    table: np.ndarray  # its KV block ids, int32

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Pages:
    """Where the KV of a step's sequences lies, in the form the attention libraries take (int32, on the host)."""

    query_starts: torch.Tensor  # [sequences + 1]
    starts: torch.Tensor  # [sequences + 1], into blocks
    blocks: torch.Tensor
    last_tokens: torch.Tensor  # [sequences], tokens in the last block


@dataclass(frozen=True)
class Tokens:
    """int32 on the GPU, each [tokens]."""

    ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor  # the KV block that the token is written to; -1: nowhere


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Host integers that can be copied without waiting. torch reuses the memory once such copies are done."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def place(spans: list[Span], block_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(position, KV block) of every token."""
    if all(span.count == 1 for span in spans):
        positions = np.fromiter((span.start for span in spans), np.int32, len(spans))
        blocks = np.fromiter((span.table[span.start // block_tokens] for span in spans), np.int32, len(spans))
        return positions, blocks
    positions = np.concatenate([np.arange(span.start, span.length, dtype=np.int32) for span in spans])
    blocks = np.concatenate([span.table[np.arange(span.start, span.length) // block_tokens] for span in spans])
    return positions, blocks


def block_counts(spans: list[Span], block_tokens: int) -> np.ndarray:
    lengths = np.fromiter((span.length for span in spans), np.int64, len(spans))
    return -(-lengths // block_tokens)
