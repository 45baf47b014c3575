"""What the driver's decisions do to the world. The core calls these and nothing else; each returns at once.

Slow work leaves as an effect and comes back as an event of `PoolCore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode
from placement.types import ModelShape
from workers.engines.trtllm.messages import Cancel, Generate
from workers.messages import Command, SampledToken

RequestKey = tuple[int, int]
"""(link, id): the gateway stream that a request came over, and the id that the gateway chose. Link 0 is the driver's own."""

OWN_LINK = 0


@dataclass(frozen=True)
class ModelFacts:
    """What the driver must know of a checkpoint: the answer to `inspect`."""

    shape: ModelShape
    digest: str
    precision: str
    max_context: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """How a request ended. `error_code` is None for stop, length and cancelled."""

    finish_reason: str  # stop, length, cancelled, error
    stop_token_id: int = -1
    error_code: ErrorCode | None = None
    error_message: str = ""
    retry_after_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0  # with the stop token, which is not among the emitted ones
    cached_tokens: int = 0
    error_field: str = ""  # of the Submit, that is wrong


class Effects(Protocol):
    def send(self, rank: int, command: Command) -> None:
        """Commands to one rank arrive in the order of the calls; the calls for all ranks are in one total order."""
        ...

    def emit(self, key: RequestKey, token: SampledToken) -> None:
        """The next token of a request."""
        ...

    def end(self, key: RequestKey, ended: Ended) -> None:
        """The last thing said about a request."""
        ...

    def hold(self, key: RequestKey, reason: str, wait_s: float) -> None:
        """The request waits for its model, about so long."""
        ...

    def inspect(self, group_id: int, model: str, spec: ModelSpec) -> None:
        """Read the checkpoint's headers. Comes back as `on_inspected`."""
        ...

    def prepare_canary(self, group_id: int, model: str, spec: ModelSpec) -> None:
        """Tokenize the canary prompt. Comes back as `on_canary_prompt`."""
        ...

    def judge_canary(self, group_id: int, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> None:
        """Compare the answer with what is expected on that placement. Comes back as `on_canary_judged`."""
        ...

    def to_engine(self, group_id: int, message: Generate | Cancel) -> None:
        """To a group whose engine schedules itself. Its tokens come back as `on_engine_tokens`."""
        ...

    def drop_engine(self, group_id: int) -> None:
        """It makes no progress: end its processes. Comes back as `on_engine_lost`."""
        ...

    def restart_ranks(self, reason: str) -> None:
        """End what is left of the ranks and start them again. Comes back as `on_ranks_up`."""
        ...

    def event(self, kind: str, subject: str, message: str) -> None:
        """Something that operators want to read later."""
        ...

    def changed(self) -> None:
        """The observed state changed: publish it without waiting for the next heartbeat."""
        ...
