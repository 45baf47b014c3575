"""What TensorRT-LLM worker groups report, as events of the pool core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.driver.core import PoolCore
from workers.engines.trtllm.messages import Output
from workers.messages import Done, Progress


class EngineReports:
    """`tell` gives the core one event at the present time."""

    def __init__(self, tell: Callable[..., Any], core: PoolCore, event: Callable[[str, str, str], None]) -> None:
        self._tell = tell
        self._core = core
        self._event = event

    def event(self, kind: str, subject: str, message: str) -> None:
        self._event(kind, subject, message)

    def done(self, rank: int, done: Done) -> None:
        self._tell(self._core.on_op_done, rank, done)

    def progress(self, rank: int, progress: Progress) -> None:
        self._tell(self._core.on_progress, rank, progress)

    def tokens(self, group_id: int, outputs: list[Output]) -> None:
        self._tell(self._core.on_engine_tokens, group_id, outputs)

    def lost(self, group_id: int, reason: str) -> None:
        self._tell(self._core.on_engine_lost, group_id, reason)
