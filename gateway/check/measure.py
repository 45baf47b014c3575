"""Asks two served models about the same places of the same texts, and the same tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.api.errors import invalid
from gateway.api.proto import inference_pb2 as inference
from gateway.check.accuracy import Limits, Place, Report, Task, judge

LIKELIEST = 20
FIRST_PLACE = 8  # tokens before the first position that is asked about
TASK_TOKENS = 16
TIMEOUT_S = 300.0


class Client(Protocol):
    """What is used of `SiteClient`."""

    def generate(self, request: inference.GenerateRequest, timeout_s: float) -> inference.GenerateResponse: ...

    def tokenize(self, request: inference.TokenizeRequest) -> inference.TokenizeResponse: ...


@dataclass(frozen=True)
class CheckSet:
    texts: tuple[str, ...]
    tasks: tuple[Task, ...]


def read_set(texts: Path, tasks: Path) -> CheckSet:
    """Texts are paragraphs of a plain file, tasks lines of JSON with `prompt` and `answer`. YardError names the line."""
    paragraphs = tuple(part.strip() for part in texts.read_text(encoding="utf-8").split("\n\n") if part.strip())
    found = []
    for number, line in enumerate(tasks.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            found.append(Task(content["prompt"], content["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise invalid(f"{tasks}:{number}: a task is a JSON object with `prompt` and `answer` ({error!r})") from error
    return CheckSet(paragraphs, tuple(found))


def compare(
    client: Client,
    reference: str,
    candidate: str,
    chosen: CheckSet,
    limits: Limits,
    *,
    places: int,
    concurrency: int = 8,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """YardError when the two do not tokenize alike, or one of them cannot be asked."""
    tokens = [_tokenize(client, reference, candidate, text) for text in chosen.texts]
    positions = [(ids, at) for ids in tokens for at in range(FIRST_PLACE, len(ids))]
    step = max(1, len(positions) // places)
    positions = positions[::step][:places]
    work = len(positions) * 2 + len(chosen.tasks) * 2
    done = 0

    def count(result: Any) -> Any:
        nonlocal done
        done += 1
        progress(done, work)
        return result

    with ThreadPoolExecutor(concurrency) as pool:
        asked = [pool.submit(_distribution, client, model, ids[:at]) for ids, at in positions for model in (reference, candidate)]
        tasks = [pool.submit(_answers, client, model, task) for task in chosen.tasks for model in (reference, candidate)]
        known = [count(future.result()) for future in asked]
        right = [count(future.result()) for future in tasks]
    compared = [Place(ids[at], known[2 * index], known[2 * index + 1]) for index, (ids, at) in enumerate(positions)]
    vocabulary = max((max(ids) for ids in tokens), default=0) + 1
    pairs = [(right[2 * index], right[2 * index + 1]) for index in range(len(chosen.tasks))]
    return judge(compared, max(vocabulary, 32_000), pairs, limits)


def _tokenize(client: Client, reference: str, candidate: str, text: str) -> list[int]:
    first, second = (
        list(client.tokenize(inference.TokenizeRequest(model=model, text=text, add_special_tokens=True)).ids)
        for model in (reference, candidate)
    )
    if first != second:
        raise invalid(f"`{reference}` and `{candidate}` do not tokenize alike, so their next tokens cannot be compared")
    return first


def _distribution(client: Client, model: str, prefix: Sequence[int]) -> dict[int, float]:
    request = inference.GenerateRequest(
        model=model,
        prompt_ids=inference.TokenIds(ids=prefix),
        max_tokens=1,
        logprobs=LIKELIEST,
        ignore_eos=True,
        sampling=inference.Sampling(temperature=0.0),
    )
    [choice] = client.generate(request, TIMEOUT_S).choices
    [token] = choice.logprobs
    return {token.token_id: token.logprob, **{other.token_id: other.logprob for other in token.alternatives}}


def _answers(client: Client, model: str, task: Task) -> bool:
    """Greedy; right when the answer is in it, letters' case aside."""
    request = inference.GenerateRequest(
        model=model, prompt=task.prompt, max_tokens=TASK_TOKENS, sampling=inference.Sampling(temperature=0.0)
    )
    [choice] = client.generate(request, TIMEOUT_S).choices
    return task.answer.lower() in choice.text.lower()
