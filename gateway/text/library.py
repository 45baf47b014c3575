"""The ModelText of every model, loaded once per generation of its spec, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.api.checkpoint import open_checkpoint, tokenizer_dir
from gateway.api.config import ModelSpec
from gateway.state.view import ModelEntry
from gateway.text.model_text import ModelText
from gateway.text.server_text import server_text

Loader = Callable[[str, ModelSpec], ModelText]

# A load that failed is what requests are told for so long; then the next one tries again.
RETRY_FAILED_S = 5.0


def checkpoint_loader(cache_dir: Path) -> Loader:
    """Reads the tokenizer that belongs to a model's weights. Blocking: a first GGUF conversion takes some seconds."""

    def load(model: str, spec: ModelSpec) -> ModelText:
        if not spec.is_managed:
            return server_text(model, spec, cache_dir)
        checkpoint = open_checkpoint(spec.source, cache_dir)
        return ModelText(
            model,
            tokenizer_dir(checkpoint, cache_dir),
            eos_ids=checkpoint.eos_ids,
            max_context=checkpoint.max_context,
            defaults=checkpoint.generation,
            chat_template=spec.chat_template,
            embeds=checkpoint.shape.encoder,
        )

    return load


class TextLibrary:
    """Single-flight: however many requests wait for a model's text, it is loaded once. A failed load is tried again later."""

    def __init__(self, load: Loader) -> None:
        self._load = load
        self._loading: dict[str, tuple[int, asyncio.Task[ModelText]]] = {}
        self._started: dict[str, float] = {}

    async def get(self, model: str, entry: ModelEntry) -> ModelText:
        """YardError(INVALID) when the checkpoint or its tokenizer cannot be read."""
        generation, task = self._loading.get(model, (-1, None))
        if task is None or generation != entry.generation or (_failed(task) and self._may_retry(model)):
            task = self._start(model, entry)
        # Shielded: one client that leaves must not stop the load for the others.
        return task.result() if task.done() else await asyncio.shield(task)

    def loaded(self, model: str) -> ModelText | None:
        """What is at hand without waiting."""
        _, task = self._loading.get(model, (-1, None))
        return task.result() if task is not None and task.done() and not _failed(task) else None

    def prefetch(self, models: Mapping[str, ModelEntry]) -> None:
        """Begins to load what is new and forgets what is gone. Servers that read text have none."""
        models = {name: entry for name, entry in models.items() if not entry.spec.reads_text}
        for name in self._loading.keys() - models.keys():
            del self._loading[name], self._started[name]
        for name, entry in models.items():
            generation, _ = self._loading.get(name, (-1, None))
            if generation != entry.generation:
                self._start(name, entry)

    def _start(self, model: str, entry: ModelEntry) -> asyncio.Task[ModelText]:
        task = asyncio.create_task(asyncio.to_thread(self._load, model, entry.spec), name=f"text-{model}")
        task.add_done_callback(_retrieve)
        self._loading[model] = (entry.generation, task)
        self._started[model] = asyncio.get_running_loop().time()
        return task

    def _may_retry(self, model: str) -> bool:
        return asyncio.get_running_loop().time() - self._started[model] > RETRY_FAILED_S


def _failed(task: asyncio.Task[ModelText]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _retrieve(task: asyncio.Task[ModelText]) -> None:
    """Marks a failure as seen: it is raised to each request that asks for the model."""
    if not task.cancelled():
        task.exception()
