"""AsyncLLM: Ray only; releases with tags that it wants named."""

from __future__ import annotations

import asyncio
from typing import Any

from tensorrt_llm.llmapi.llm import LLM


class AsyncLLM(LLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "orchestrator_type": "ray"})

    async def setup_async(self) -> None:
        await asyncio.sleep(0)

    async def release(self, tags: list[str]) -> None:
        await asyncio.to_thread(self._release, tags)

    async def resume(self, tags: list[str]) -> None:
        await asyncio.to_thread(self._resume, tags)
