"""The Helm chart, rendered and held against KubeRay's schema; and what its pods start and do at their end."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm_templates import render

from gateway import drain
from gateway.api.errors import YardError

KUBERNETES = Path(__file__).parents[3] / "ops" / "kubernetes"
CHART = KUBERNETES / "chart"
SCHEMA = json.loads((KUBERNETES / "facts" / "rayservice-v1.json").read_text())["schema"]


def service(**changes: Any) -> dict[str, Any]:
    [found] = [item for item in render(CHART, "production", **changes) if item["kind"] == "RayService"]
    return found["spec"]


@pytest.mark.parametrize("changes", [{}, {"tlsSecretName": "tls", "mutualTls": True}, {"pools": []}, {"clients": []}])
def test_the_ray_service_is_what_the_operator_takes(changes: dict[str, Any]) -> None:
    jsonschema.validate(service(**changes), SCHEMA)
    broken = service(**changes)
    broken["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_serve_is_told_what_there_is_to_import() -> None:
    import gateway.cluster

    config = yaml.safe_load(service()["serveConfigV2"])
    assert config["proxy_location"] == "Disabled"
    assert {application["name"]: application["route_prefix"] for application in config["applications"]} == {
        "gateway": None,
        "controller": None,
    }
    for application in config["applications"]:
        module, _, name = application["import_path"].partition(":")
        assert module == gateway.cluster.__name__
        assert callable(getattr(gateway.cluster, name))


def test_one_pool_a_node_with_its_cards() -> None:
    [group] = service()["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert group["rayStartParams"]["num-gpus"] == "8"
    assert json.loads(group["rayStartParams"]["resources"].strip("'"))["modelyard_pool_mib"] == 655360
    assert pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == (
        "kubernetes.io/hostname"
    )
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == ["NVIDIA-H100-80GB-HBM3"]
    assert {volume["name"] for volume in pod["volumes"]} == {"artifacts", "shm"}


def test_nothing_secret_is_written_and_only_clients_come_in() -> None:
    """Rule 15: credentials come from the cluster's Secret by name."""
    objects = {item["kind"]: item for item in render(CHART, "production")}
    [head] = objects["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item for item in head["env"]}
    for name in ("MODELYARD_REDIS", "MODELYARD_SECRET"):
        assert "value" not in environment[name]
        assert environment[name]["valueFrom"]["secretKeyRef"]["name"] == "modelyard"
    rules = objects["NetworkPolicy"]["spec"]["ingress"]
    assert "ports" not in rules[0]
    assert [port["port"] for port in rules[1]["ports"]] == [50051, 8000]
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert head["lifecycle"]["preStop"]["exec"]["command"][:3] == ["python", "-m", "gateway.drain"]


def test_a_pod_gets_its_runtime_from_the_environment() -> None:
    from gateway.cluster import runtime

    made = runtime({"MODELYARD_REDIS": "redis://r", "MODELYARD_SECRET": "s", "MODELYARD_GRPC_PORT": "7", "MODELYARD_SITE": "x"})
    assert (made.site, made.grpc_port, made.bind_host, made.internal_tls) == ("x", 7, "node", True)
    with pytest.raises(YardError, match="MODELYARD_SECRET"):
        runtime({"MODELYARD_REDIS": "redis://r"})


def test_a_pod_waits_for_its_requests_before_it_ends(tmp_path: Path) -> None:
    answers = ["2.0", "1.0", "0.0"]

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = answers.pop(0) if len(answers) > 1 else answers[0]
            body = f'modelyard_requests_in_flight{{surface="grpc"}} {value}\n'.encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        assert not drain.asked(tmp_path)
        assert drain.drain(tmp_path, url, 30.0, settle_s=0.0)
        assert drain.asked(tmp_path)
        assert len(answers) == 1
        answers[:] = ["5.0"]
        assert not drain.drain(tmp_path, url, 0.2, settle_s=0.0)
        server.shutdown()
    assert drain.drain(tmp_path, url, 5.0, settle_s=0.0), "without a gateway there is nothing to wait for"
