"""`yard simulate` on the default site: no site runs for it, and its queues are the gateway's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.api.errors import ErrorCode, YardError
from gateway.cli.app import app
from gateway.cli.simulated_site import GateQueue, read_site
from placement.simulated_group import Job

SITE = str(Path(__file__).parents[3] / "configs" / "local")
SMALL = ("--prompt-tokens", "32", "--output-tokens", "16", "--seconds", "60")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["simulate", "--site", SITE, "-o", "json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_drawn_trace_is_replayed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    first = run("--generate", "1", *SMALL, "--write", str(file))
    again = run("--trace", str(file))
    assert first["requests"] == again["requests"] > 30
    assert {row["model"] for row in first["models"]} == {"smollm2", "smollm2-pp2"}
    assert again["within_slo"] == pytest.approx(first["within_slo"], abs=0.05)


def test_what_if_a_model_doubles() -> None:
    one, two = (run("--generate", "1", *SMALL, *more) for more in ((), ("--times", "smollm2=2")))
    counts = [{row["model"]: row["requests"] for row in outcome["models"]} for outcome in (one, two)]
    assert counts[1]["smollm2"] == 2 * counts[0]["smollm2"]
    assert counts[1]["smollm2-pp2"] == counts[0]["smollm2-pp2"]


def test_how_many_devices_a_load_needs() -> None:
    answer = run("--generate", "1", *SMALL, "--fewest", "--target", "90")
    assert answer["devices"] == answer["tried"][-1]["devices"] >= 2  # the pipeline needs two


def test_measured_speeds_replace_the_cost_model(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps({"smollm2": {"base_s": 1.0, "sequence_s": 0.0, "prompt_token_s": 0.0}}))
    slow = run("--generate", "0.1", *SMALL, "--model", "smollm2", "--speeds", str(file))
    row = next(row for row in slow["models"] if row["model"] == "smollm2")
    assert row["token_p50_s"] == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to replay"),
        (("--trace", "/nowhere.csv"), "No such file"),
        (("--generate", "1", "--times", "smollm2"), "write MODEL=FACTOR"),
        (("--generate", "1", "--times", "chat=2"), "--times: the site has no model `chat`, only smollm2, smollm2-pp2"),
        (("--generate", "1", "--model", "chat"), "--model: the site has no model `chat`, only smollm2, smollm2-pp2"),
        (("--generate", "0.001", "--seconds", "1"), "nothing to replay: there are no requests"),
        (("--trace", "/tmp", "--format", "servegen"), "chunk-N-trace.csv"),
    ],
)
def test_errors_say_what_to_do(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(YardError, match=message):
        CliRunner().invoke(app, ["simulate", "--site", SITE, *arguments], catch_exceptions=False)


def test_models_that_the_site_does_not_have_are_named(tmp_path: Path) -> None:
    trace, header = tmp_path / "trace.csv", "time_s,model,prompt_tokens,output_tokens\n"
    trace.write_text(header + "0,smollm2,8,8\n1,chat,8,8\n")
    arguments = ["simulate", "--site", SITE, "--trace", str(trace)]
    told = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "1 request is for models that the site does not have, and was left out: chat" in told
    assert run("--trace", str(trace))["left_out"] == {"chat": 1}
    trace.write_text(header + "0,chat,8,8\n1,code,8,8\n")
    with pytest.raises(
        YardError, match=r"nothing to replay: 2 requests are for .* left out: chat, code; the site has smollm2"
    ) as nothing:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert nothing.value.code is ErrorCode.INVALID


def test_clients_of_servegen_without_a_dataset_are_left_out(tmp_path: Path) -> None:
    for client in (0, 1, 2):
        (tmp_path / f"chunk-{client}-trace.csv").write_text("0,1.0,1.0,Gamma,1,1\n600,0,1,Gamma,1,1\n")
    lengths = {"input_tokens": {"32": 1.0}, "output_tokens": {"8": 1.0}}
    for client in (0, 2):
        (tmp_path / f"chunk-{client}-dataset.json").write_text(json.dumps({"0": lengths}))
    arguments = ["simulate", "--site", SITE, "--trace", str(tmp_path), "--format", "servegen", "--seconds", "60"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "left out, for their dataset is not there: chunk-1-trace.csv" in result.stderr
    assert "smollm2-pp2" in result.stdout


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    run("--generate", "1", *SMALL, "--chart", str(file))
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("command", [("simulate", "--site", SITE, "--generate", "1", "--chart"), ("bench", "m", "--plot")])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(YardError, match="no such directory"):
        CliRunner().invoke(app, [*command, str(tmp_path / "no" / "run.png")], catch_exceptions=False)
    monkeypatch.setattr("gateway.cli.pictures.find_spec", lambda name: None)
    with pytest.raises(YardError, match=r"needs matplotlib: `.venv/bin/pip install -e '.\[chart\]'`"):
        CliRunner().invoke(app, [*command, str(tmp_path / "run.png")], catch_exceptions=False)


def test_cards_have_the_memory_of_their_type(tmp_path: Path) -> None:
    pool = "apiVersion: modelyard/v1\nkind: Pool\nmetadata: {name: g}\nspec: {device: cuda, devices: 10}\n"
    (tmp_path / "pool.yaml").write_text(pool)
    models = Path(SITE) / "models.yaml"
    site = read_site([tmp_path / "pool.yaml", models], tmp_path, "H200")
    assert {device.node for device in site.devices} == {"g-0", "g-1"}
    assert 130 * 2**30 < site.devices[0].capacity_bytes < 141 * 2**30
    with pytest.raises(YardError, match="--gpu"):
        read_site([tmp_path / "pool.yaml", models], tmp_path, "")


def test_the_queue_of_a_simulation_is_the_gateways() -> None:
    """Its last is refused when it is full, and who waited longest is next."""
    queue = GateQueue(limit=2)
    jobs = [Job(float(number), 0, 1, 1) for number in range(3)]
    refused = [queue.push(job, 2.0, job.arrived_s) for job in jobs]
    assert refused == [None, None, jobs[2]]
    assert queue.pop(5.0) is jobs[0]
    assert len(queue) == 1
