"""Enqueueing steps: inputs to the GPU, the stage, and the newest tokens; eagerly, or as one CUDA graph a batch size.

Everything a step needs from the host travels in one copy from pinned memory. Newest tokens stay in `newest`, from which the next
step takes those that the host does not know yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from workers.comm.base import GroupComm
from workers.engines.torch.cuda.attention import Attention
from workers.engines.torch.cuda.batch import Pages, Span, Tokens, block_counts, pinned, place
from workers.engines.torch.cuda.flash import DecodePages, FlashAttention
from workers.engines.torch.cuda.sequences import Part
from workers.engines.torch.cuda.stack import BeforeLayer, Stack
from workers.engines.torch.stage import StageModel

log = logging.getLogger(__name__)

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
        self._comm = comm
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
            self._comm.recv_previous(hidden)
        return self.stack(hidden, tokens, before_layer)

    def send(self, hidden: torch.Tensor) -> None:
        self._comm.send_next(hidden)

    def head(self, hidden: torch.Tensor) -> Computed:
        logits = self._model.lm_head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        return Computed(logits, logits.argmax(dim=-1))


class StepRunner(Protocol):
    def run(self, parts: list[Part], before_layer: BeforeLayer | None) -> Computed | None:
        """None on stages that sample nothing."""
        ...


class EagerSteps:
    """Any step."""

    def __init__(
        self, network: Network, attention: Attention, newest: torch.Tensor, block_tokens: int, device: torch.device
    ) -> None:
        self._network = network
        self._attention = attention
        self._newest = newest
        self._block_tokens = block_tokens
        self._device = device

    def run(self, parts: list[Part], before_layer: BeforeLayer | None) -> Computed | None:
        spans = [part.span for part in parts]
        positions, blocks = place(spans, self._block_tokens)
        ends = np.cumsum([span.count for span in spans])
        ids = np.concatenate([np.array(part.tokens or (0,), dtype=np.int32) for part in parts])
        rows = [int(end) - 1 for part, end in zip(parts, ends, strict=True) if part.state is not None]
        known_here = [(int(end) - 1, part.place) for part, end in zip(parts, ends, strict=True) if not part.tokens]
        count, waiting = len(ids), len(known_here)
        host = pinned(3 * count + len(rows) + 2 * waiting, self._device)
        array = host.numpy()
        array[:count], array[count : 2 * count], array[2 * count : 3 * count] = ids, positions, blocks
        array[3 * count : 3 * count + len(rows)] = rows
        if known_here:
            array[3 * count + len(rows) :] = np.array(known_here, dtype=np.int32).T.reshape(-1)
        inputs = host.to(self._device, non_blocking=True)
        tokens = Tokens(*inputs[: 3 * count].view(3, count).unbind(0))
        if known_here:
            at, places = inputs[3 * count + len(rows) :].view(2, waiting)
            tokens.ids.index_copy_(0, at.long(), self._newest.index_select(0, places))
        self._attention.plan(spans, _pages(spans, self._block_tokens, self._device))
        hidden = self._network.hidden(tokens, before_layer)
        if not self._network.stage.is_last:
            self._network.send(hidden)
            return None
        if not rows:
            return None
        return self._network.head(hidden.index_select(0, inputs[3 * count : 3 * count + len(rows)]))


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
    """Steps of one token a sequence of single-stage groups, padded to a batch size that has a graph."""

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
        self._idle = Part(0, (0,), Span(1, 0, np.zeros(1, np.int32)), newest.shape[0] - 1, None)

    def fits(self, parts: list[Part]) -> bool:
        return len(parts) <= self._sizes[-1] and parts[-1].span.count == 1

    def capture(self, pool: Any) -> None:
        """Largest first, so that smaller graphs find room in what it used. Runs each once before; block 0 must be mapped."""
        for size in reversed(self._sizes):
            self._load([self._idle], size)
            tokens = self._tokens(size)
            for _ in range(2):  # libraries choose and set up their kernels
                self._compute(tokens, size)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                computed = self._compute(tokens, size)
            self._graphs[size] = graph, computed

    def run(self, parts: list[Part], before_layer: BeforeLayer | None) -> Computed:
        """The result is overwritten by the next step of any size."""
        del before_layer  # graphs run when all layers are there
        size = next(size for size in self._sizes if size >= len(parts))
        self._load(parts, size)
        graph, computed = self._graphs[size]
        graph.replay()
        return Computed(computed.logits[: len(parts)], computed.greedy[: len(parts)])

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
        ids[used:], positions[used:], blocks[used:], places[used:], last_tokens[used:] = 0, 0, -1, self._newest.shape[0] - 1, 1
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
        ids = torch.where(tokens.ids < 0, self._newest[places], tokens.ids)
        hidden = self._network.hidden(Tokens(ids, tokens.positions, tokens.blocks), None)
        computed = self._network.head(hidden)
        self._newest.index_copy_(0, places.long(), computed.greedy.int())
        return computed


_RANGES = torch.arange(_BATCH_SIZES[-1] + 1, dtype=torch.int32)
