"""From a checked request to what is sent to a pool: token ids, and one sequence per choice."""

from __future__ import annotations

from gateway.admission.caller import Caller
from gateway.api.proto.pool_pb2 import SamplingParams, Submit
from gateway.routing.route_table import Resolved
from gateway.servers.request import UINT64, GenerationRequest, answer_budget, check_ids, check_length
from gateway.text.model_text import ModelText

SHADOW_PRIORITY = -1000
"""Below every model and tenant."""


async def prompt_tokens(request: GenerationRequest, text: ModelText, context: int) -> list[int]:
    """YardError(INVALID) for ids that the model has not, and for texts that cannot fit its context."""
    if request.prompt_ids is not None:
        answer_budget(request, len(request.prompt_ids), context)  # before time is spent on each
        check_ids(request.prompt_ids, text.vocabulary_size, request.named("prompt_ids"))
        return list(request.prompt_ids)
    if request.messages is not None:
        check_length(request, sum(len(message["content"]) for message in request.messages), context * text.longest_token)
        chat = text.render_chat(request.messages, tools=request.tools, begin_with=request.begin_with)
        check_length(request, len(chat.text), context * text.longest_token)
        return await text.encode_chat(chat)
    prompt = request.prompt or ""
    check_length(request, len(prompt), context * text.longest_token)
    return await text.encode(prompt, add_special_tokens=request.add_special_tokens)


def submits(
    request: GenerationRequest,
    resolved: Resolved,
    caller: Caller,
    *,
    prompt_ids: list[int],
    max_tokens: int,
    sampling: SamplingParams,
) -> list[Submit]:
    """One per choice; they differ in their seeds."""
    made = []
    for index in range(request.n):
        submit = Submit(
            model=resolved.model,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            tenant=caller.tenant,
            tenant_weight=caller.spec.weight,
            priority=SHADOW_PRIORITY if request.shadow else resolved.entry.spec.priority + caller.priority,
            shadow=request.shadow,
            request_id=request.request_id,
            traceparent=request.traceparent,
        )
        submit.sampling.seed = (sampling.seed + index) % UINT64
        made.append(submit)
    return made
