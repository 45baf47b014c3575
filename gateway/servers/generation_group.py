"""Several prompts in one request (OpenAI's /v1/completions): their generations run side by side and are read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.api.proto.pool_pb2 import Hold
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.generation import Generation, Usage
from gateway.servers.generation_path import GenerationPath
from gateway.servers.request import GenerationRequest


class GenerationGroup:
    """Like one Generation whose choices are numbered through: those of prompt i are i * n to i * n + n - 1.

    - All are prepared before one runs, so what is wrong with any prompt is said before anything is answered.
    - They enter one after the other, and each is received from the moment it entered. So none holds its share of a pool
      while it waits for another's, and requests of more sequences than a pool takes pass through it piece by piece, in turns
      with everybody else's.
    - When one fails, all end.
    """

    def __init__(self, path: GenerationPath, requests: list[GenerationRequest]) -> None:
        self.generations = [Generation(path, request) for request in requests]
        self._choices_each = requests[0].n
        self._news: asyncio.Queue[list[ChoiceDelta] | Hold | BaseException | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(requests)

    @property
    def first(self) -> Generation:
        return self.generations[0]

    @property
    def done(self) -> bool:
        return all(generation.done for generation in self.generations)

    @property
    def tokens(self) -> int:
        return sum(generation.tokens for generation in self.generations)

    @property
    def usage(self) -> Usage:
        parts = [generation.usage for generation in self.generations]
        return Usage(sum(part.prompt_tokens for part in parts), self.tokens, sum(part.cached_tokens for part in parts))

    async def start(self) -> None:
        """Until the first has entered. YardError of the first that cannot be prepared; then none runs."""
        try:
            for generation in self.generations:
                await generation.prepare()
            await self.first.enter()
        except BaseException:
            self.close()
            raise
        if len(self.generations) > 1:
            self._own(self._pump(0, self.first), "prompt-0")
            self._own(self._enter_others(), "prompts")

    async def _enter_others(self) -> None:
        for index, generation in enumerate(self.generations[1:], start=1):
            await generation.enter()
            self._own(self._pump(index, generation), f"prompt-{index}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(self._telling(work), name=name))

    async def _telling(self, work: Coroutine[Any, Any, None]) -> None:
        """Its failure is told to whoever receives."""
        try:
            await work
        except BaseException as error:
            self._news.put_nowait(error)
            if not isinstance(error, Exception):
                raise

    async def receive(self) -> list[ChoiceDelta] | Hold | None:
        if not self._tasks:
            return await self.first.receive()
        while self._left:
            news = await self._news.get()
            if isinstance(news, BaseException):
                self.close()
                raise news
            if news is not None:
                return news
            self._left -= 1
        return None

    def close(self) -> None:
        """Whoever waits in `receive` gets CANCELLED, as a closed Generation says so."""
        for generation in self.generations:
            generation.close()

    async def _pump(self, index: int, generation: Generation) -> None:
        while True:
            news = await generation.receive()
            if isinstance(news, list):
                for delta in news:
                    delta.index += index * self._choices_each
            self._news.put_nowait(news)
            if news is None:
                return
