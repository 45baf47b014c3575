"""From the tensors that users of LLMs on Triton send to requests for tokens, and from what comes back to their tensors. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import invalid, not_found, shortened
from gateway.api.proto.kserve_pb2 import ModelInferRequest, ModelInferResponse
from gateway.servers import kserve_tensors as tensors
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.kserve_tensors import BYTES, Tensor
from gateway.servers.request import GenerationRequest, Sampling

VERSION = "1"
"""Triton numbers the versions of a model. Here a route is switched instead, so there is one."""
MAX_PROMPTS = 64
FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True)
class Input:
    """`field`: of Sampling, or of GenerationRequest for the first three kinds."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    field: str = ""


INPUTS = (
    Input("text_input", BYTES, (-1,)),
    Input("input_ids", "INT32", (-1,)),
    Input("input_lengths", "INT32", (1,)),
    Input("max_tokens", "INT32", (1,), ("request_output_len",)),
    Input("stream", "BOOL", (1,), ("streaming",)),
    Input("stop_words", BYTES, (-1,), ("stop",)),
    Input("temperature", "FP32", (1,), (), "temperature"),
    Input("top_k", "INT32", (1,), ("runtime_top_k",), "top_k"),
    Input("top_p", "FP32", (1,), ("runtime_top_p",), "top_p"),
    Input("min_p", "FP32", (1,), (), "min_p"),
    Input("repetition_penalty", "FP32", (1,), (), "repetition_penalty"),
    Input("presence_penalty", "FP32", (1,), (), "presence_penalty"),
    Input("frequency_penalty", "FP32", (1,), (), "frequency_penalty"),
    Input("random_seed", "UINT64", (1,), ("seed",), "seed"),
    Input("end_id", "INT32", (1,)),
)
OUTPUTS = (("text_output", BYTES), ("output_ids", "INT32"))

_BY_NAME = {name: known for known in INPUTS for name in (known.name, *known.aliases)}
_WITHOUT_EFFECT = frozenset({"pad_id"})
_FIELD_OF = {"max_tokens": "max_tokens", "prompt": "text_input", "prompt_ids": "input_ids"}


@dataclass(slots=True)
class InferRequest:
    """One request: a generation for each prompt."""

    asked: ModelInferRequest
    generations: list[GenerationRequest]
    stream: bool
    outputs: tuple[str, ...]
    batched: bool  # the prompts came with a batch dimension, so answers have one too

    def response(self, deltas: Sequence[ChoiceDelta], *, model: str) -> ModelInferResponse:
        """What is new of each prompt's answer; those in `deltas` are in the order of the prompts."""
        asked = self.asked
        response = ModelInferResponse(model_name=asked.model_name, model_version=VERSION, id=asked.id)
        response.parameters["modelyard_model"].string_param = model
        raw = bool(asked.raw_input_contents)
        for name in self.outputs:
            if name == "text_output":
                shape = [len(deltas), 1] if self.batched else [len(deltas)]
                values: list[Any] = [delta.text.encode() for delta in deltas]
                tensors.add_output(response, name, BYTES, shape, values, raw=raw)
            else:
                ids = deltas[0].token_ids
                tensors.add_output(response, name, "INT32", [1, len(ids)] if self.batched else [len(ids)], ids, raw=raw)
        return response


def check_version(model: str, version: str) -> None:
    if version not in ("", VERSION):
        raise not_found(f"model `{shortened(model)}` has no version {shortened(version)!r}; leave it out, or ask for {VERSION}")


def infer_request(asked: ModelInferRequest, *, now: float, deadline: float | None, headers: Mapping[str, str]) -> InferRequest:
    """`now` and `deadline` are on the clock of the running loop. YardError(INVALID) names the tensor."""
    check_version(asked.model_name, asked.model_version)
    given = _known(tensors.read_inputs(asked))
    prompts, batched = _prompts(given)
    outputs = _outputs(asked, given)
    if "output_ids" in outputs and len(prompts) > 1:
        raise invalid("output_ids are given for one prompt; send each prompt in a request of its own", "output_ids")
    rows = len(prompts)
    columns = {
        known.field: _column(given[known.name], rows, float_=known.datatype == "FP32")
        for known in INPUTS
        if known.field and known.name in given
    }
    max_tokens = _column(given["max_tokens"], rows) if "max_tokens" in given else None
    end_ids = _column(given["end_id"], rows) if "end_id" in given else [-1] * rows
    stream = "stream" in given and any(tensors.booleans(given["stream"]))
    names = {known.field: known.name for known in INPUTS if known.field} | _FIELD_OF
    generations = [
        GenerationRequest(
            model=asked.model_name,
            request_id=asked.id or uuid.uuid4().hex,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=prompt if isinstance(prompt, list) else None,
            max_tokens=None if max_tokens is None else max_tokens[row],
            sampling=Sampling(**{field: values[row] for field, values in columns.items()}),
            stop=[stop for stop in tensors.texts(given["stop_words"]) if stop] if "stop_words" in given else (),
            stop_token_ids=[end_ids[row]] if end_ids[row] >= 0 else (),
            return_token_ids="output_ids" in outputs,
            deadline=_deadline(asked, now, deadline),
            traceparent=headers.get("traceparent", ""),
            headers=headers,
            names=names,
        )
        for row, prompt in enumerate(prompts)
    ]
    return InferRequest(asked, generations, stream, outputs, batched)


def _known(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names that we give them."""
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name == "beam_width" and tensors.integers(tensor) == [1]:
            continue
        known = _BY_NAME.get(name)
        if known is None:
            raise invalid(
                f"input {shortened(name)} is not known; the inputs are {', '.join(known.name for known in INPUTS)}",
                shortened(name),
            )
        if known.name in found:
            raise invalid(f"inputs {found[known.name].name} and {name} say the same; send one of them", name)
        found[known.name] = tensor
    return found


def _prompts(given: dict[str, Tensor]) -> tuple[list[str] | list[list[int]], bool]:
    """The prompts, and whether they came with a batch dimension."""
    text, ids = given.get("text_input"), given.get("input_ids")
    if (text is None) == (ids is None):
        raise invalid("send either text_input or input_ids", "text_input")
    if text is not None:
        if len(text.shape) > 2 or (len(text.shape) == 2 and text.shape[1] != 1):
            raise invalid(f"text_input has the shape {list(text.shape)}; send [prompts] or [prompts, 1]", "text_input")
        if not 1 <= len(text.values) <= MAX_PROMPTS:
            raise invalid(f"text_input has {len(text.values)} prompts; send 1 to {MAX_PROMPTS}", "text_input")
        return tensors.texts(text), len(text.shape) == 2
    assert ids is not None
    if len(ids.shape) > 2 or (len(ids.shape) == 2 and ids.shape[0] != 1):
        raise invalid(f"input_ids has the shape {list(ids.shape)}; send one prompt as [tokens] or [1, tokens]", "input_ids")
    values = tensors.integers(ids)
    if "input_lengths" in given:
        values = values[: _column(given["input_lengths"], 1)[0]]
    return [values], len(ids.shape) == 2


def _column(tensor: Tensor, rows: int, *, float_: bool = False) -> list[Any]:
    """A value for each prompt: one for all, or one each."""
    values = tensors.numbers(tensor) if float_ else tensors.integers(tensor)
    if len(values) not in (1, rows):
        raise invalid(f"input {tensor.name} has {len(values)} values for {rows} prompts; send 1 or {rows}", tensor.name)
    return values if len(values) == rows else values * rows


def _outputs(asked: ModelInferRequest, given: dict[str, Tensor]) -> tuple[str, ...]:
    if not asked.outputs:
        return ("text_output",) if "text_input" in given else ("output_ids",)
    known = dict(OUTPUTS)
    for output in asked.outputs:
        if output.name not in known:
            name = shortened(output.name)
            raise invalid(f"output {name} is not known; the outputs are {', '.join(known)}", name)
        if "shared_memory_region" in output.parameters:
            raise invalid(f"output {output.name} cannot be put into shared memory; it comes in the answer", output.name)
    return tuple(dict.fromkeys(output.name for output in asked.outputs))


def _deadline(asked: ModelInferRequest, now: float, deadline: float | None) -> float | None:
    """The call's, or the earlier one that the request's own `timeout` gives: in microseconds, 0 is none."""
    if "timeout" not in asked.parameters:
        return deadline
    parameter = asked.parameters["timeout"]
    microseconds = parameter.int64_param or parameter.uint64_param
    if microseconds < 0:
        raise invalid(f"the parameter timeout is {microseconds}; it must be microseconds, or 0 for none", "timeout")
    own = now + microseconds / 1e6 if microseconds else None
    return min((end for end in (own, deadline) if end is not None), default=None)
