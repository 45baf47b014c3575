"""What `yard plan` prints, and what its exit code says to CI."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gateway.api.proto import admin_pb2 as pb
from gateway.cli import plans
from gateway.cli.app import app


@pytest.mark.parametrize(
    ("change", "action", "code"),
    [
        ("unchanged", "keep", plans.NOTHING),
        ("changed", "keep", plans.CHANGES),
        ("unchanged", "load", plans.CHANGES),
        ("unchanged", "move", plans.CHANGES),
        ("created", "none", plans.IMPOSSIBLE),
        ("unchanged", "external", plans.NOTHING),
    ],
)
def test_the_exit_code_tells_ci_what_an_apply_would_be(change: str, action: str, code: int) -> None:
    answer = pb.PlanResponse(
        changes=[pb.Change(kind="Model", name="m", action=change)], placements=[pb.Placement(model="m", action=action)]
    )
    assert plans.exit_code(answer) == code
    assert (plans.NOTHING, plans.CHANGES, plans.IMPOSSIBLE) == (0, 2, 1)


def test_a_plan_shows_paths_times_evictions_and_risks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        pb.Placement(
            model="new", pool="p", ranks=[0], action="load", path="load", bytes=3 * 2**30, seconds=6.0, standby=True,
            evicts=["old"], risks=["`old` may be parked for `new`"],
        ),
        pb.Placement(model="big", action="none", reasons=["needs 2 × 14.0 GiB"]),
    ]  # fmt: skip
    plans.show(pb.PlanResponse(placements=rows))
    shown = capsys.readouterr().out
    assert "takes turns with old" in shown
    assert "3.0 GiB to bring, about 6.0 s" in shown
    assert "SLOs at risk:\n- `old` may be parked" in shown
    assert "nowhere" in shown


def test_a_wrong_file_is_no_change() -> None:
    """2 would say to CI that there is something to apply."""
    result = CliRunner().invoke(app, ["plan", "-f", "/nowhere.yaml"])
    assert result.exit_code == plans.IMPOSSIBLE
    assert "/nowhere.yaml" in result.output
