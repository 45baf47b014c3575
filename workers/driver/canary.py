"""The canary of rule 8: a prompt in tokens, and whether the answer is the right one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from redis.exceptions import RedisError
from tokenizers import Tokenizer

from gateway.api.checkpoint import open_checkpoint, tokenizer_dir
from gateway.api.config import CanarySpec, ModelSpec
from gateway.api.records import Keys
from gateway.api.redis_link import connect

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 3.0


class AnswerStore:
    """The first answer of each placement: in Redis for all pools, and in the cache directory for when Redis is away (rule 12)."""

    def __init__(self, redis_url: str, site: str, cache_dir: Path) -> None:
        self._redis = connect(redis_url) if redis_url else None
        self._key = Keys(site).canaries
        self._directory = cache_dir / "canaries"

    async def first(self, field: str, answer: str) -> str:
        """The stored answer; `answer` itself where there was none."""
        file = self._directory / f"{hashlib.sha256(field.encode()).hexdigest()}.txt"
        local = file.read_text() if file.exists() else None
        stored = await self._shared(field, local if local is not None else answer)
        if stored is None:
            stored = local if local is not None else answer
        if stored != local:
            self._directory.mkdir(parents=True, exist_ok=True)
            file.write_text(stored)
        return stored

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    async def _shared(self, field: str, answer: str) -> str | None:
        if self._redis is None:
            return None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._redis.hsetnx(self._key, field, answer)  # type: ignore[misc]
                stored = await self._redis.hget(self._key, field)  # type: ignore[misc]
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("canary answers: Redis is away (%s), comparing with the local copy", type(error).__name__)
            return None
        return stored.decode() if isinstance(stored, bytes) else stored


class Canaries:
    def __init__(self, store: AnswerStore, cache_dir: Path) -> None:
        self._store = store
        self._cache_dir = cache_dir

    def prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        """Blocking. YardError when the checkpoint has no readable tokenizer."""
        return tuple(self._tokenizer(spec).encode(spec.canary.prompt).ids)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        """Empty when the answer is right, else what is wrong."""
        answer = await asyncio.to_thread(lambda: self._tokenizer(spec).decode(list(tokens)))
        canary = spec.canary
        if canary.expect is not None:
            if canary.expect in answer:
                return ""
            return f"canary of `{model}`: {canary.prompt!r} was answered {answer!r}, which does not contain {canary.expect!r}"
        stored = await self._store.first(answer_field(placement, canary), answer)
        if answer == stored:
            return ""
        return (
            f"canary of `{model}`: {canary.prompt!r} was answered {answer!r}, the stored answer of this placement is {stored!r}; "
            "if the change is meant, set canary.expect"
        )

    def _tokenizer(self, spec: ModelSpec) -> Tokenizer:
        directory = tokenizer_dir(open_checkpoint(spec.source, self._cache_dir), self._cache_dir)
        return Tokenizer.from_file(str(directory / "tokenizer.json"))


def answer_field(placement: str, canary: CanarySpec) -> str:
    """placement is digest|engine|precision|tensor|pipeline|device; another prompt has another answer."""
    prompt = hashlib.sha256(f"{canary.max_tokens}|{canary.prompt}".encode()).hexdigest()[:16]
    return f"{placement}|{prompt}"
