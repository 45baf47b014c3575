"""What a driver reads from checkpoints: the `ModelReader` of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import ModelSpec
from workers.driver.canary import AnswerStore, Canaries
from workers.driver.effects import ModelFacts


class CheckpointReader:
    def __init__(self, cache_dir: Path, answers: AnswerStore) -> None:
        self._cache_dir = cache_dir
        self._canaries = Canaries(answers, cache_dir)

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        """Blocking; the first call for a checkpoint hashes its files. YardError names the file and the fix."""
        del model
        checkpoint = open_checkpoint(spec.source, self._cache_dir)
        return ModelFacts(
            shape=checkpoint.shape,
            digest=checkpoint.digest,
            precision=checkpoint.precision if spec.precision == "auto" else spec.precision,
            max_context=checkpoint.max_context,
            eos_ids=checkpoint.eos_ids,
        )

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return self._canaries.prompt(spec)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return await self._canaries.judge(model, spec, placement, tokens)
