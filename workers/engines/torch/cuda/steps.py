"""Enqueueing steps: inputs to the GPU, the stage, and the newest tokens; eagerly, or as one CUDA graph a batch size.

Everything a step needs from the host travels in one copy from pinned memory. Newest tokens stay in `newest`, from which the next
step takes those that the host does not know yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workers.comm.base import GroupComm
from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.attention import Attention
from workers.engines.torch.cuda.batch import Pages, Span, Tokens, block_counts, pinned, place
from workers.engines.torch.cuda.flash import DecodePages, FlashAttention
from workers.engines.torch.cuda.sequences import Part
from workers.engines.torch.cuda.stack import BeforeLayer, Stack
from workers.engines.torch.stage import StageModel

log = logging.getLogger(__name__)

_MOST_READ_TOKENS = 16384  # by prompts: 2 ms of an H200's memory for a 7B model
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)


def batch_sizes(concurrency: int) -> list[int]:
    """Of decode graphs, ascending: smaller batches are padded to the next."""
    sizes = [size for size in _BATCH_SIZES if size < concurrency]
    return [*sizes, min(concurrency, _BATCH_SIZES[-1])]


@dataclass(frozen=True)
class Computed:
    """Logits and the largest of each row: of the last sampled tokens, in the order of the step's parts that sample."""

    logits: torch.Tensor
    greedy: torch.Tensor  # int64


class Network:
    """A stage with its embedding and head."""

    def __init__(self, stage: StageModel, stack: Stack, comm: GroupComm, dtype: torch.dtype, device: torch.device) -> None:
        self.stage = stage
        self.stack = stack
        self.comm = comm
        self._dtype = dtype
        self._device = device
        self._model: Any = stage.model
        self._embedding: Any = stage.model.get_input_embeddings()
        self._hidden = stage.base.config.hidden_size
        self._softcap = getattr(stage.model.config, "final_logit_softcapping", None)

    def hidden(self, tokens: Tokens, before_layer: BeforeLayer | None) -> torch.Tensor:
        """[tokens, hidden] after this stage."""
        if self.stage.is_first:
            hidden = self._embedding(tokens.ids)
        else:
            hidden = torch.empty((tokens.ids.shape[0], self._hidden), dtype=self._dtype, device=self._device)
            self.comm.recv_previous(hidden)
        return self.stack(hidden, tokens, before_layer)

    def send(self, hidden: torch.Tensor) -> None:
        self.comm.send_next(hidden)

    def head(self, hidden: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> Computed:
        """The most likely tokens become the newest at `places` (int32)."""
        logits = self._model.lm_head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        return Computed(logits, ops.largest(logits, places, newest))


class EagerSteps:
    """Any step. Its most likely tokens are in `newest` afterwards."""

    def __init__(
        self, network: Network, attention: Attention, newest: torch.Tensor, block_tokens: int, device: torch.device
    ) -> None:
        self._network = network
        self._attention = attention
        self._newest = newest
        self._block_tokens = block_tokens
        self._device = device

    def run(self, parts: list[Part], before_layer: BeforeLayer | None) -> Computed | None:
        """None where nothing is sampled."""
        spans = [part.span for part in parts]
        positions, blocks = place(spans, self._block_tokens)
        lasts = (np.cumsum([span.count for span in spans]) - 1).tolist()
        ids = np.concatenate([np.array(part.tokens or (0,), dtype=np.int32) for part in parts])
        sampled = [(last, part.place) for part, last in zip(parts, lasts, strict=True) if part.state is not None]
        known_here = [(last, part.place) for part, last in zip(parts, lasts, strict=True) if not part.tokens]
        count = len(ids)
        sizes = [3 * count, 2 * len(sampled), 2 * len(known_here)]
        host = pinned(sum(sizes), self._device)
        array = host.numpy()
        array[: 3 * count].reshape(3, count)[:] = ids, positions, blocks
        array[3 * count :] = np.array([*sampled, *known_here], dtype=np.int32).reshape(-1)
        placed, rows, known = host.to(self._device, non_blocking=True).split(sizes)
        tokens = Tokens(*placed.view(3, count).unbind(0))
        if known_here:
            at, places = known.view(-1, 2).unbind(1)
            tokens.ids.index_copy_(0, at.long(), self._newest.index_select(0, places))
        self._attention.plan(spans, _pages(spans, self._block_tokens, self._device))
        hidden = self._network.hidden(tokens, before_layer)
        if not self._network.stage.is_last:
            self._network.send(hidden)
            return None
        if not sampled:
            return None
        at, places = rows.view(-1, 2).unbind(1)
        return self._network.head(hidden.index_select(0, at), places.contiguous(), self._newest)


def _pages(spans: list[Span], block_tokens: int, device: torch.device) -> Pages:
    counts = block_counts(spans, block_tokens)
    sequences, total = len(spans), int(counts.sum())
    host = pinned(3 * sequences + 2 + total, device)
    query_starts, starts, last_tokens, blocks = host.split([sequences + 1, sequences + 1, sequences, total])
    query_starts[0] = starts[0] = 0
    np.cumsum([span.count for span in spans], out=query_starts.numpy()[1:])
    np.cumsum(counts, out=starts.numpy()[1:])
    last_tokens.numpy()[:] = [(span.length - 1) % block_tokens + 1 for span in spans]
    np.concatenate([span.table[:used] for span, used in zip(spans, counts, strict=True)], out=blocks.numpy())
    return Pages(query_starts, starts, blocks, last_tokens)


class GraphSteps:
    """Small steps of single-stage groups, as so many decodes, padded to a batch size that has a graph.

    The tokens of a prompt are decodes too: each layer puts the keys and values of all of them in place before its attention, and
    each of them sees what lies before it. That reads a prefix once a token, so it is for short prompts only. The most likely
    tokens are in `newest` afterwards.
    """

    def __init__(
        self,
        network: Network,
        attention: FlashAttention,
        newest: torch.Tensor,
        block_tokens: int,
        most_blocks: int,
        sizes: list[int],
        device: torch.device,
    ) -> None:
        """`most_blocks`: KV blocks of the longest sequence. The last place of `newest` belongs to padding."""
        self._network = network
        self._attention = attention
        self._newest = newest
        self._block_tokens = block_tokens
        self._sizes = sizes
        self._device = device
        self._inputs = torch.zeros(6 * sizes[-1] + 1 + sizes[-1] * most_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._spare = newest.shape[0] - 1
        self._idle = Part(0, (0,), Span(1, 0, np.zeros(1, np.int32)), self._spare, None)

    def fits(self, parts: list[Part]) -> bool:
        tokens = sum(part.span.count for part in parts)
        read = sum(part.span.count * part.span.length for part in parts if part.span.count > 1)
        return tokens <= self._sizes[-1] and read <= _MOST_READ_TOKENS

    def capture(self, pool: Any) -> None:
        """Largest first, so that smaller graphs find room in what it used. Runs each once before; block 0 must be mapped."""
        for size in reversed(self._sizes):
            self._load([self._idle], size)
            tokens = self._tokens(size)
            with self._network.comm.quiet():
                for _ in range(2):  # libraries choose and set up their kernels
                    self._compute(tokens, size)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                computed = self._compute(tokens, size)
            self._graphs[size] = graph, computed

    def run(self, parts: list[Part]) -> Computed | None:
        """None where nothing is sampled. The result is overwritten by the next step of any size."""
        rows = parts if parts[-1].span.count == 1 else [row for part in parts for row in self._rows(part)]
        size = next(size for size in self._sizes if size >= len(rows))
        self._load(rows, size)
        graph, computed = self._graphs[size]
        graph.replay()
        sampled = [number for number, row in enumerate(rows) if row.state is not None]
        if len(sampled) == len(rows):
            return Computed(computed.logits[: len(rows)], computed.greedy[: len(rows)])
        if not sampled:
            return None
        at = torch.tensor(sampled, pin_memory=True).to(self._device, non_blocking=True)
        return Computed(computed.logits[at], computed.greedy[at])

    def _rows(self, part: Part) -> list[Part]:
        """Token by token; only the last one may be sampled."""
        span = part.span
        if span.count == 1:
            return [part]
        tables = [Span(1, position, span.table) for position in range(span.start, span.length)]
        before = [Part(part.sequence, (token,), one, self._spare, None) for token, one in zip(part.tokens, tables, strict=True)]
        return [*before[:-1], Part(part.sequence, part.tokens[-1:], tables[-1], part.place, part.state)]

    def close(self) -> None:
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _load(self, parts: list[Part], size: int) -> None:
        """Inputs: ids, positions, blocks, places, last tokens [size] each, block starts [size + 1], block ids."""
        used = len(parts)
        spans = [part.span for part in parts]
        counts = np.ones(size, np.int64)
        counts[:used] = block_counts(spans, self._block_tokens)
        total = int(counts.sum())
        host = pinned(6 * size + 1 + total, self._device)
        array = host.numpy()
        ids, positions, blocks, places, last_tokens = array[: 5 * size].reshape(5, size)
        ids[:used] = [part.tokens[0] if part.tokens else -1 for part in parts]
        positions[:used], blocks[:used] = place(spans, self._block_tokens)
        places[:used] = [part.place for part in parts]
        last_tokens[:used] = positions[:used] % self._block_tokens + 1
        # Padding reads one token that is there, and writes nowhere.
        ids[used:], positions[used:], blocks[used:], places[used:], last_tokens[used:] = 0, 0, -1, self._spare, 1
        if parts[0] is self._idle:
            blocks[0] = -1
        starts = array[5 * size : 6 * size + 1]
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        tables = [span.table[:blocks_used] for span, blocks_used in zip(spans, counts, strict=False)]
        spare = np.full(size - used, spans[0].table[0], np.int32)
        np.concatenate([*tables, spare], out=array[6 * size + 1 :])
        self._inputs[: host.shape[0]].copy_(host, non_blocking=True)
        pages = Pages(_RANGES[: size + 1], host[5 * size : 6 * size + 1], host[6 * size + 1 :], host[4 * size : 5 * size])
        self._attention.plan_decode(pages, self._memory(size))

    def _memory(self, size: int) -> DecodePages:
        inputs = self._inputs
        return DecodePages(inputs[5 * size : 6 * size + 1], inputs[6 * size + 1 :], inputs[4 * size : 5 * size])

    def _tokens(self, size: int) -> Tokens:
        return Tokens(*self._inputs[: 3 * size].view(3, size).unbind(0))

    def _compute(self, tokens: Tokens, size: int) -> Computed:
        places = self._inputs[3 * size : 4 * size]
        ids = ops.known_ids(tokens.ids, places, self._newest)
        hidden = self._network.hidden(Tokens(ids, tokens.positions, tokens.blocks), None)
        return self._network.head(hidden, places, self._newest)


_RANGES = torch.arange(_BATCH_SIZES[-1] + 1, dtype=torch.int32)
