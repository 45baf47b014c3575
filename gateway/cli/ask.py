"""run: one prompt to a route or a model, its answer streamed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.api.errors import invalid
from gateway.cli import printing
from gateway.cli.options import Output, OutputOption, ServerOption, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.api.proto import inference_pb2 as inference
    from gateway.site.client import SiteClient


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A route, or a model's own name.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="`-` reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1)] = 300.0,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Ask a model and print its answer as it comes."""
    if raw and system is not None:
        raise invalid("--system needs the chat template; leave out --raw")
    text = sys.stdin.read() if prompt == "-" else prompt
    with connect(server) as client:
        chunks = _ask(client, model, text, max_tokens, temperature, seed, system, raw, timeout_s)
        answer = _follow(chunks, echo=output is Output.table)
    if output is not Output.table:
        printing.document(answer, output)


def _ask(
    client: SiteClient,
    model: str,
    text: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    system: str | None,
    raw: bool,
    timeout_s: float,
) -> Iterator[inference.GenerateChunk]:
    from gateway.api.proto import inference_pb2 as inference

    sampling = inference.Sampling(temperature=temperature, seed=seed)
    if raw:
        request = inference.GenerateRequest(model=model, prompt=text, max_tokens=max_tokens, sampling=sampling)
        return client.generate_stream(request, timeout_s)
    messages = [inference.Message(role="user", content=text)]
    if system is not None:
        messages.insert(0, inference.Message(role="system", content=system))
    return client.chat_stream(
        inference.ChatRequest(model=model, messages=messages, max_tokens=max_tokens, sampling=sampling), timeout_s
    )


def _follow(chunks: Iterator[inference.GenerateChunk], *, echo: bool) -> dict[str, Any]:
    """Prints the text as it arrives, notes on a wait to standard error, and returns the whole answer."""
    from gateway.api.proto import inference_pb2 as inference

    answer: dict[str, Any] = {"request_id": "", "model": "", "text": "", "finish_reason": ""}
    for chunk in chunks:
        answer["request_id"], answer["model"] = chunk.request_id or answer["request_id"], chunk.model or answer["model"]
        if chunk.HasField("held") and sys.stderr.isatty():
            typer.echo(f"waiting: {chunk.held.reason} (about {chunk.held.estimated_wait_ms / 1000:.1f} s)", err=True)
        for choice in chunk.choices:
            answer["text"] += choice.text
            if echo and choice.text:
                sys.stdout.write(choice.text)
                sys.stdout.flush()
            if choice.finish_reason:
                answer["finish_reason"] = inference.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
        if chunk.HasField("usage"):
            usage = chunk.usage
            answer["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
    if echo:
        typer.echo()
    return answer
