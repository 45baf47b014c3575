"""/v1/embeddings: one vector for each text, through the same path as everything else."""

from __future__ import annotations

import base64
from array import array
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import invalid
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.http_reply import Reply
from gateway.servers.metrics import RequestMeter
from gateway.servers.openai_endpoint import GenerationEndpoint
from gateway.servers.openai_request import ApiRequest, read_prompts
from gateway.servers.request import GenerationRequest

MAX_TEXTS = 2048


@dataclass(slots=True)
class EmbeddingsRequest(ApiRequest):
    as_base64: bool = False


def embeddings_request(body: dict[str, Any], request_id: str, deadline: float | None, traceparent: str) -> EmbeddingsRequest:
    model = body.get("model")
    if not isinstance(model, str):
        raise invalid("model must be a string", "model")
    if body.get("dimensions") is not None:
        raise invalid("dimensions is not supported: vectors have the size that the model gives them; leave it out", "dimensions")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise invalid("encoding_format must be float or base64", "encoding_format")
    generations = [
        GenerationRequest(
            model=model,
            request_id=request_id,
            prompt=text if isinstance(text, str) else None,
            prompt_ids=text if isinstance(text, list) else None,
            embed=True,
            max_tokens=1,
            deadline=deadline,
            traceparent=traceparent,
            names={"prompt": "input", "prompt_ids": "input", "max_tokens": "input"},
        )
        for text in read_prompts(body.get("input"), "input", MAX_TEXTS)
    ]
    return EmbeddingsRequest(
        chat=False,
        model=model,
        generations=generations,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        echo=False,
        request_id=request_id,
        as_base64=encoding == "base64",
    )


class EmbeddingsEndpoint(GenerationEndpoint):
    async def _whole(self, request: ApiRequest, group: GenerationGroup, news: Any, meter: RequestMeter, reply: Reply) -> None:
        assert isinstance(request, EmbeddingsRequest)
        while news is not None:
            news = await group.receive()
        meter.text()
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(generation.embedding, request.as_base64)}
            for index, generation in enumerate(group.generations)
        ]
        tokens = group.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await reply.json({"object": "list", "data": data, "model": group.first.model, "usage": usage})


def vector(embedding: bytes) -> list[float]:
    """Of fp32, little endian."""
    values = array("f", embedding)
    return values.tolist()


def _encoded(embedding: bytes, as_base64: bool) -> str | list[float]:
    return base64.b64encode(embedding).decode() if as_base64 else vector(embedding)
