"""`yard bench` and `yard stress` against a gateway whose pool does what the test says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from lone_gateway import LoneGateway, ids_of
from scripted_pool import ScriptedPool, SubmittedSequence
from typer.testing import CliRunner

from gateway.api.errors import YardError
from gateway.cli import load_progress
from gateway.cli.app import app
from gateway.load.drive import Plan, run
from gateway.load.report import Outcome, Slo, by_second, percentiles, report
from gateway.load.targets import check, target_of


def answering(pool: ScriptedPool, byte_level: Path) -> list[SubmittedSequence]:
    """Every third request is refused; the others get what they asked for, in two pieces."""
    seen: list[SubmittedSequence] = []
    ids = ids_of(byte_level, "word " * 40)

    def script(sequence: SubmittedSequence) -> None:
        seen.append(sequence)
        if len(seen) % 3 == 0:
            sequence.fail("exhausted", "full", 1000)
            return
        count = sequence.submit.max_tokens
        sequence.tokens(ids[:1])
        sequence.end("length", tokens=ids[1:count])

    pool.script = script
    return seen


@pytest.mark.parametrize("surface", ["grpc", "http"])
async def test_a_run_counts_what_came(lone: LoneGateway, pool: ScriptedPool, byte_level: Path, surface: str) -> None:
    seen = answering(pool, byte_level)
    target = target_of(lone.http if surface == "http" else f"127.0.0.1:{lone.servers.grpc_port}", None, None)
    ended: list[int] = []
    try:
        outcomes, elapsed_s = await run(Plan("m", 20, 5, concurrency=2, requests=12), target, ended.append)
    finally:
        await target.close()
    summary = report(outcomes, elapsed_s, Slo(first_token_ms=60_000))
    assert (summary["requests"], summary["completed"]) == (12, 8)
    assert ended == list(range(1, 13))
    assert summary["errors"] == {"exhausted" if surface == "grpc" else "429": 4}
    assert all(outcome.tokens == 5 for outcome in outcomes if outcome.ok)
    assert summary["first_token_ms"]["p50"] > 0
    assert summary["good_share"] == pytest.approx(8 / 12, abs=0.001)
    if surface == "grpc":
        assert {len(sequence.submit.prompt_ids) for sequence in seen} == {20}
        assert len({tuple(sequence.submit.prompt_ids[:8]) for sequence in seen}) > 6, "prompts share no beginning"


async def test_clients_that_leave_are_no_errors(lone: LoneGateway, pool: ScriptedPool) -> None:
    pool.script = lambda sequence: None  # never answers
    target = target_of(f"grpc://127.0.0.1:{lone.servers.grpc_port}", None, None)
    try:
        outcomes, elapsed_s = await run(Plan("m", 4, 4, concurrency=2, requests=4, cancel_one_in=1), target)
    finally:
        await target.close()
    summary = report(outcomes, elapsed_s, Slo())
    assert (summary["cancelled"], summary["errors"], summary["completed"]) == (4, {}, 0)


async def test_what_does_not_answer_is_not_measured(lone: LoneGateway) -> None:
    target = target_of(f"127.0.0.1:{lone.servers.grpc_port}", None, None)
    try:
        with pytest.raises(YardError, match="not_found"):
            await check(target, "nope")
    finally:
        await target.close()
    with pytest.raises(YardError, match="ftp"):
        target_of("ftp://x", None, None)


async def test_the_command_writes_json_and_a_picture(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, tmp_path: Path
) -> None:
    ids = ids_of(byte_level, "word " * 40)
    pool.script = lambda sequence: sequence.end("length", tokens=ids[: sequence.submit.max_tokens])
    result, picture = tmp_path / "result.json", tmp_path / "run.png"
    arguments = ["bench", "m", "--target", f"127.0.0.1:{lone.servers.grpc_port}", "--requests", "4", "--concurrency", "2"]
    arguments += ["--input-tokens", "8", "--output-tokens", "3", "--slo-first-ms", "60000", "--json", str(result)]
    ran = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--plot", str(picture)])
    assert ran.exit_code == 0, ran.output
    assert "goodput" in ran.output
    assert json.loads(result.read_text())["completed"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_how_far_a_run_is_stands_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_progress, "PLAIN_S", 0.01)
    async with load_progress.shown(Plan("m", 4, 4, concurrency=2, requests=128)) as progress:
        progress(37)
        told = ""
        for _ in range(500):
            await asyncio.sleep(0.01)
            if told := capsys.readouterr().err:
                break
    assert told.startswith("37 of 128, ")
    assert load_progress.line(Plan("m", 4, 4, 2, duration_s=300), 412, 41.2) == "412 requests, 41 of 300 s"


def test_goodput_is_what_met_every_promise() -> None:
    fast = Outcome(0.0, first_s=0.1, total_s=1.1, tokens=11)
    slow_first = Outcome(0.0, first_s=0.9, total_s=1.9, tokens=11)
    slow_tokens = Outcome(0.0, first_s=0.1, total_s=5.1, tokens=11)
    failed = Outcome(1.5, error="unavailable", total_s=0.1)
    summary = report([fast, slow_first, slow_tokens, failed], 2.0, Slo(first_token_ms=500, token_ms=200))
    assert (summary["goodput_per_s"], summary["good_share"]) == (0.5, 0.25)
    assert summary["output_tokens_per_s"] == 16.5
    assert percentiles([0.001, 0.003]) == {"p50": 2.0, "p90": 2.8, "p99": 2.98, "mean": 2.0, "max": 3.0}
    assert by_second([fast, failed], 2.0) == ([0.0, 11, 0.0], [0, 1, 0])
