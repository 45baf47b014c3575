"""A whole site with TensorRT-LLM models, over the stand-in: real Ray, real processes, ranks launched by mpiexec."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from house import House
from trtllm_checkpoint import write_checkpoint
from trtllm_environment import make_environment, mpi_variables

from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import GroupRecord

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """One node that says it has two GPUs."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 12, "num_gpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("trtllm") / "env", import_s=0.2, load_s=0.3, late_free_s=0.5).parents[1]


@pytest.fixture(scope="module", params=["mpiexec", "ray"])
def trtllm_site(
    request: pytest.FixtureRequest, cluster, environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    site = tmp_path_factory.mktemp("site")
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    ranks = {"launch": "mpiexec"} if request.param == "mpiexec" else {"orchestrator": "ray"}
    engine = {"python": str(environment / "bin" / "python"), "environment": mpi_variables("mpiexec"), **ranks}
    _write(site, "Site", "trtllm", {"engines": {"trtllm": engine}})
    pool = {"device": "cuda", "devices": 2, "memory": "2300MiB", "standby": "12GiB", "engines": ["trtllm"]}
    _write(site, "Pool", "gpus", pool)
    model = {"source": f"file:{checkpoint}", "engine": "trtllm", "tensor_parallel": 2}
    for name in ("a", "b"):
        _write(site, "Model", name, {**model, "kv": {"floor": "8MiB", "block_tokens": 32}})
    _write(site, "Route", "chat", {"targets": [{"model": "a"}]})
    house = House(tmp_path_factory.mktemp("home"), "--site", str(site), "--ray-address", cluster.address)
    started = house.up()
    assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
    yield house
    house.down()


def _write(site: Path, kind: str, name: str, spec: dict) -> None:
    document = {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    (site / f"{kind.lower()}-{name}.yaml").write_text(yaml.safe_dump(document))


def test_from_apply_to_tokens_park_wake_crash_and_recovery(trtllm_site: House, environment: Path) -> None:
    """Rule 11: the group comes back as one. Rule 9: nothing had been sent of the answer, so it is asked for again."""
    house = trtllm_site
    house.wait_until("one serves, one is parked", lambda _: {_state(house, "a"), _state(house, "b")} == {"ready", "parked"})
    assert _ask(house, "chat", "abc", 9) == "abcabcabc"
    assert _ask(house, "b", "xyz", 6) == "xyzxyz"
    assert (_state(house, "a"), _state(house, "b")) == ("parked", "ready"), "the request woke one and parked the other"
    assert _group(house, "b").engine == "trtllm"
    (environment / "crash-1").touch()
    answer = _ask(house, "b", "xyz", 200)
    assert not (environment / "crash-1").exists(), "a rank has crashed"
    assert answer == ("xyz" * 67)[:200]
    assert _ask(house, "a", "xyz", 3) == "xyz"


def _ask(house: House, model: str, prompt: str, tokens: int) -> str:
    channel, stub = house.inference()
    with channel:
        request = pb.GenerateRequest(model=model, prompt=prompt, max_tokens=tokens, ignore_eos=True)
        return stub.Generate(request, timeout=60).choices[0].text


def _group(house: House, model: str) -> GroupRecord:
    [group] = house.groups(model)
    return group


def _state(house: House, model: str) -> str:
    return next((group.state for group in house.groups(model)), "nowhere")
