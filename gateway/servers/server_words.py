"""A request for a model whose server runs elsewhere: what of it can be asked there, and in which words."""

from __future__ import annotations

from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from gateway.link.words import Words
from gateway.servers.request import GenerationRequest, Sampling

CHARACTERS_PER_TOKEN = 4
"""Of a prompt whose tokens nobody counts here, until its server says how many there were."""


def check_words(request: GenerationRequest, model: str, spec: ModelSpec) -> None:
    """YardError(INVALID) for what a server that answers in text does not give, with the way out."""
    what = f"model `{model}` is a server that runs elsewhere"
    if spec.reads_text and request.prompt_ids is not None:
        name = request.named("prompt_ids")
        raise invalid(
            f"{what} and is sent text, so it takes no token ids: send text, or set its spec.tokenizer to "
            "the directory of its tokenizer",
            name,
        )
    if request.embed:
        raise invalid(f"{what} that is asked for text only; ask another model for embeddings", "model")
    if request.return_token_ids or request.logprobs is not None:
        name = "return_token_ids" if request.return_token_ids else request.named("logprobs")
        raise invalid(f"{what} and answers in text, without ids and logprobs: leave {name} out, or ask it as trtllm+grpc", name)


def words_of(request: GenerationRequest) -> Words:
    sampling = {name: value for name in Sampling.__slots__ if (value := getattr(request.sampling, name)) is not None}
    return Words(request.messages, request.prompt, tuple(request.stop), request.add_special_tokens, sampling)


def estimated_tokens(request: GenerationRequest) -> int:
    characters = sum(len(str(message["content"])) for message in request.messages or ()) + len(request.prompt or "")
    return max(1, characters // CHARACTERS_PER_TOKEN)
