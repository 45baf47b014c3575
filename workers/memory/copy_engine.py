"""Copies in and out of a GPU: ordered transfers cut into chunks, lanes that carry them, and fair turns between transfers.

A *lane* is a stream on one physical path (host to GPU, GPU to host, peer GPU to GPU, host to GPU through a peer). Each lane has
a thread that takes one chunk from the transfer whose turn it is, so that wakes that run at once share the link evenly, and
several lanes of one link take chunks of the same transfer at the pace each can go. About `window_bytes` wait in a lane's
stream, filled up again when half of them have gone: half bridges the time the thread needs to get a busy interpreter's lock,
the whole is little enough that a new transfer starts within milliseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Link = Literal["host_in", "host_out", "peer"]
WINDOW_BYTES = 768 * 2**20  # 14 ms of a PCIe Gen5 link; half of it more than the interpreter's switch interval of 5 ms


@dataclass(frozen=True)
class Chunk:
    destination: int
    source: int
    size_bytes: int


class Arrival(Protocol):
    """A point in a stream. torch.cuda.Event is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: torch.cuda.Stream) -> None: ...


class Lane(Protocol):
    name: str
    link: Link

    def copy(self, chunk: Chunk) -> Arrival:
        """Enqueue; the point at which this chunk and all before it on this lane will have arrived. Called by one thread."""
        ...

    def close(self) -> None: ...


class Transfer:
    """An ordered copy of `chunks` chunks under way.

    `source` makes the chunks one by one, on a lane's thread, and may do work between them (a wake maps pages just ahead of the
    copy). `marks` are ascending numbers of chunks: mark i has arrived when the first marks[i] chunks have. When the source or a
    copy fails, nothing more is sent, what was sent is waited for, `undo` runs, and every waiter gets the error.
    """

    def __init__(
        self, name: str, link: Link, source: Iterator[Chunk], chunks: int, marks: Sequence[int], undo: Callable[[], None]
    ) -> None:
        if list(marks) != sorted(marks) or (marks and not 0 < marks[0] <= marks[-1] <= chunks):
            raise ValueError(f"transfer {name}: marks {list(marks)} do not ascend within 1..{chunks}")
        self.name = name
        self.link: Link = link
        self._source = source
        self._chunks = chunks
        self._marks = marks
        self._undo = undo
        self._moved = threading.Condition()
        self._taken = 0
        self._sent: set[int] = set()  # Chunks sent out of turn by a faster lane
        self._sent_to = 0  # All chunks before this one are sent
        self._newest: dict[str, Arrival] = {}  # By lane
        self._reached: list[tuple[Arrival, ...]] = []  # By mark
        self._error: BaseException | None = None
        self._ended = chunks == 0

    @property
    def over(self) -> bool:
        """True when all of it has arrived, or when it failed and is undone."""
        with self._moved:
            return self._ended and (self.failed or all(event.query() for event in self._newest.values()))

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait_mark(self, mark: int, stream: torch.cuda.Stream, timeout_s: float) -> None:
        """Let `stream` go on once mark `mark` has arrived. The caller waits only until the copies are enqueued."""
        for event in self._sent_mark(mark, timeout_s):
            event.wait(stream)

    def wait(self, timeout_s: float) -> None:
        """Return once all of it has arrived. Raises what made it fail, or TimeoutError."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._ended, timeout_s):
                raise TimeoutError(f"transfer {self.name}: {self._sent_to} of {self._chunks} chunks sent after {timeout_s} s")
            self._raise()
            events = list(self._newest.values())
        for event in events:
            event.synchronize()

    # ---------------------------------------------------------------- for the engine; one lane at a time holds the turn

    def take(self) -> tuple[int, Chunk] | None:
        """The next chunk and its number; None when there is none left. Raises what the source raises."""
        if self._error is not None or self._taken == self._chunks:
            return None
        chunk = next(self._source)
        self._taken += 1
        return self._taken - 1, chunk

    def sent(self, lane: str, number: int, event: Arrival) -> None:
        with self._moved:
            self._newest[lane] = event
            self._sent.add(number)
            while self._sent_to in self._sent:
                self._sent.remove(self._sent_to)
                self._sent_to += 1
            reached = len(self._reached)
            while len(self._reached) < len(self._marks) and self._marks[len(self._reached)] <= self._sent_to:
                self._reached.append(tuple(self._newest.values()))
            self._ended = self._ended or self._sent_to == self._chunks
            if self._ended or len(self._reached) > reached:
                self._moved.notify_all()

    def stop(self, error: BaseException) -> None:
        """No more chunks; the first error counts."""
        with self._moved:
            self._error = self._error or error

    def end_failed(self) -> None:
        """Called once no lane is sending a chunk of this transfer any more."""
        for event in self._newest.values():
            event.synchronize()
        self._undo()
        with self._moved:
            self._ended = True
            self._moved.notify_all()

    def _sent_mark(self, mark: int, timeout_s: float) -> tuple[Arrival, ...]:
        with self._moved:
            if not self._moved.wait_for(lambda: self._ended or len(self._reached) > mark, timeout_s):
                raise TimeoutError(f"transfer {self.name}: mark {mark} not reached after {timeout_s} s")
            self._raise()
            return self._reached[mark]

    def _raise(self) -> None:
        if self._ended and self._error is not None:
            raise RuntimeError(f"transfer {self.name} failed and was undone: {self._error}") from self._error


class CopyEngine:
    """The lanes of one GPU, and the transfers that wait for them."""

    def __init__(self, lanes: Sequence[Lane], window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._turns: dict[Link, _Turns] = {lane.link: _Turns() for lane in lanes}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"copy-{lane.name}", daemon=True) for lane in lanes
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer. ValueError when no lane goes its way."""
        turns = self._turns.get(transfer.link)
        if turns is None:
            raise ValueError(f"transfer {transfer.name}: no lane for {transfer.link}; there are {sorted(self._turns)}")
        turns.add(transfer)

    def close(self) -> None:
        """Finish what was submitted, then end the threads."""
        for turns in self._turns.values():
            turns.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, lane: Lane) -> None:
        turns = self._turns[lane.link]
        queue: deque[tuple[Arrival, int]] = deque()
        while (transfer := turns.take()) is not None:
            try:
                self._send_one(lane, transfer, turns, queue)
            except BaseException as error:  # noqa: BLE001  whoever waits for the transfer gets it
                transfer.stop(error)
            turns.done(transfer)
        lane.close()

    def _send_one(self, lane: Lane, transfer: Transfer, turns: _Turns, queue: deque[tuple[Arrival, int]]) -> None:
        taken = transfer.take()
        if taken is None:
            return
        turns.add(transfer)
        number, chunk = taken
        event = lane.copy(chunk)
        transfer.sent(lane.name, number, event)
        queue.append((event, chunk.size_bytes))
        queued_bytes = sum(size for _, size in queue)
        if queued_bytes <= self._window_bytes:
            return
        while queued_bytes > self._window_bytes // 2:
            event, size = queue.popleft()
            queued_bytes -= size
        event.synchronize()


class _Turns:
    """The transfers of one link in the order of their turns. A lane that takes one adds it again once it has its chunk."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Transfer] = deque()
        self._sending: dict[Transfer, int] = {}  # How many lanes are sending a chunk of it
        self._closing = False

    def add(self, transfer: Transfer) -> None:
        with self._changed:
            self._waiting.append(transfer)
            self._changed.notify()

    def take(self) -> Transfer | None:
        """Wait for a transfer and take its turn; None when the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or (self._closing and not self._sending))
            if not self._waiting:
                return None
            transfer = self._waiting.popleft()
            self._sending[transfer] = self._sending.get(transfer, 0) + 1
            return transfer

    def done(self, transfer: Transfer) -> None:
        """The lane has sent its chunk, or failed to. The last one out of a failed transfer ends it."""
        with self._changed:
            self._sending[transfer] -= 1
            last = self._sending[transfer] == 0
            if last:
                del self._sending[transfer]
            if last and transfer.failed and transfer in self._waiting:
                self._waiting.remove(transfer)
            if self._closing:
                self._changed.notify_all()
        if last and transfer.failed:
            transfer.end_failed()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
