"""Arguments for each version: what is passed, what is refused, and that every name is one that the facts know."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtllm_environment import STANDIN, make_environment

from gateway.api.config import EngineSpec
from gateway.api.errors import YardError
from gateway.api.trtllm.arguments import Demand, arguments, graph_sizes, problems
from gateway.api.trtllm.features import Features, park_method
from gateway.site.home import RUN_VARIABLE
from workers.driver.engine_launch import boot_command, environment, server_command
from workers.engines.trtllm.messages import Generate
from workers.engines.trtllm.model import Model

VERSIONS = ("1.2.1", "1.3.0rc29", "1.4.0rc1")
FACTS = json.loads((STANDIN / "llm_api.json").read_text())
NOT_IN_THE_LIST = {"telemetry_config"}  # the page on the constructor names it; the list of its arguments was read before
ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"
DEMAND = Demand("chat", "/models/chat", 2, 2, context=4096, concurrency=64, batch_tokens=2048, kv_bytes=4 * 2**30, kv_tokens=9999)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Features]:
    found = {}
    for version in VERSIONS:
        python = make_environment(tmp_path_factory.mktemp("env") / version, version, import_s=0)
        command = boot_command(EngineSpec(python=str(python)), "probe")
        done = subprocess.run(command, env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=True)
        found[version] = msgspec.json.decode(done.stdout, type=Features)
    return found


def settings(**changes: Any) -> EngineSpec:
    return EngineSpec.model_validate({"python": "/opt/trtllm/bin/python", **changes})


def all_arguments(probed: dict[str, Features]) -> dict[str, dict[str, Any]]:
    """Of every version, with every orchestrator that it can use."""
    found: dict[str, dict[str, Any]] = {}
    for version, features in probed.items():
        for changes in ({}, {"orchestrator": "ray"}):
            wanted = settings(**changes)
            for demand in (DEMAND, dataclasses.replace(DEMAND, precision="bf16", ranks_on_node=2, tensor_parallel=1)):
                if not problems(demand, features, wanted):
                    found[f"{version} {changes} {demand.precision}"] = arguments(demand, features, wanted).kwargs
    return found


def test_every_name_that_is_passed_is_in_the_facts(probed: dict[str, Features]) -> None:
    """The contract: constructor arguments, fields of their configurations, and sampling parameters."""
    known = {row["name"] for row in FACTS["llm_init"]["parameters"]} | NOT_IN_THE_LIST
    passed = all_arguments(probed)
    assert len(passed) == 2 * len(VERSIONS) + 4
    for kwargs in passed.values():
        assert kwargs.keys() <= known
        for name, value in kwargs.items():
            if isinstance(value, dict) and isinstance(FACTS.get(name), list):
                assert value.keys() <= {row["name"] for row in FACTS[name]}, name
    sampling = {row["name"] for row in FACTS["sampling_params"]}
    model = Model.__new__(Model)
    model._sampling = sampling
    everything = Generate(1, [1], 5, [2], 2, 0.7, 0.9, 40, 0.1, 1.1, 0.5, 0.5, 7, 3)
    assert set(model._sampling_of(everything)) <= sampling


def test_every_method_that_is_called_is_in_the_facts() -> None:
    source = (Path(__file__).parents[3] / "workers/engines/trtllm/model.py").read_text()
    called = set(re.findall(r"self\._llm\.(\w+)\(", source)) - {"setup_async"}
    assert called == {"generate_async", "get_stats", "shutdown"}
    assert called | {"release", "resume"} <= FACTS["llm_methods"].keys()
    assert "setup_async()" in FACTS["async_llm"]["async_methods_AL"]


def test_the_status_of_every_name_is_in_the_architecture(probed: dict[str, Features]) -> None:
    status = {row["name"]: row["status"] for row in FACTS["llm_init"]["parameters"]}
    page = ARCHITECTURE.read_text(encoding="utf-8")
    for name in {name for kwargs in all_arguments(probed).values() for name in kwargs} | {"_mpi_session"}:
        row = next((line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line), None)
        assert row is not None, f"`{name}` is in no table of ARCHITECTURE.md"
        if status.get(name):
            assert status[name] in row, f"{name} is {status[name]}"


@pytest.mark.parametrize("version", VERSIONS)
def test_kv_is_given_in_bytes(probed: dict[str, Features], version: str) -> None:
    """Rule 4: never as a share of what is free at the moment."""
    kv = arguments(DEMAND, probed[version], settings()).kwargs["kv_cache_config"]
    assert kv["max_gpu_total_bytes"] == 4 * 2**30
    assert kv["free_gpu_memory_fraction"] == 1.0


def test_a_version_without_bytes_is_told_the_tokens_that_they_hold(probed: dict[str, Features]) -> None:
    features = probed["1.2.1"]
    fields = tuple(name for name in features.configs["kv_cache_config"] if name != "max_gpu_total_bytes")
    features = msgspec.structs.replace(features, configs={**features.configs, "kv_cache_config": fields})
    made = arguments(DEMAND, features, settings())
    assert made.kwargs["kv_cache_config"]["max_tokens"] == 9999
    assert any("tokens only" in note for note in made.notes)


def test_what_parks_how_by_version_ranks_and_orchestrator(probed: dict[str, Features]) -> None:
    old, middle, new = (probed[version] for version in VERSIONS)
    assert park_method(old, world=1, orchestrator="mpi") == "reload"
    assert park_method(middle, world=1, orchestrator="mpi") == "release"
    assert park_method(middle, world=2, orchestrator="mpi") == "reload"  # raises NotImplementedError there
    assert park_method(middle, world=2, orchestrator="ray") == "async_release"
    assert park_method(new, world=2, orchestrator="mpi") == "release"
    assert park_method(new, world=2, orchestrator="mpi", wanted="reload") == "reload"
    kwargs = {version: arguments(DEMAND, probed[version], settings()).kwargs for version in VERSIONS}
    assert [("enable_sleep" in kwargs[v], "sleep_config" in kwargs[v]) for v in VERSIONS] == [(False, False)] * 2 + [
        (False, True)
    ]


def test_usage_data_is_switched_off_or_accepted(probed: dict[str, Features]) -> None:
    new = probed["1.4.0rc1"]
    assert arguments(DEMAND, new, settings()).kwargs["telemetry_config"] == {"enabled": False}
    assert "telemetry_config" not in arguments(DEMAND, new, settings(telemetry=True)).kwargs
    unknown = msgspec.structs.replace(new, configs={**new.configs, "telemetry_config": ("endpoint",)})
    assert any("usage data" in problem for problem in problems(DEMAND, unknown, settings()))


@pytest.mark.parametrize(
    ("version", "demand", "changes", "problem"),
    [
        ("1.2.1", {}, {"orchestrator": "ray"}, "cannot place its ranks in a given placement group"),
        ("1.4.0rc1", {"quantization": "W8A8_SQ_PER_CHANNEL"}, {}, "went with the TensorRT backend"),
        ("1.4.0rc1", {"precision": "fp8", "stored_precision": "bf16"}, {}, "run `yard engine quantize`"),
        ("1.4.0rc1", {"precision": "bf16", "quantization": "FP8"}, {}, "leave precision out"),
        ("1.4.0rc1", {"kv_block_tokens": 24}, {}, "power of two"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    probed: dict[str, Features], version: str, demand: dict, changes: dict, problem: str
) -> None:
    with pytest.raises(YardError, match=re.escape(problem)):
        arguments(dataclasses.replace(DEMAND, **demand), probed[version], settings(**changes))


def test_other_releases_are_refused(probed: dict[str, Features]) -> None:
    features = msgspec.structs.replace(probed["1.4.0rc1"], version="1.1.0")
    assert problems(DEMAND, features, settings()) == [
        "TensorRT-LLM 1.1.0 (/opt/trtllm/bin/python) is none of the supported releases, 1.2 to 1.4; install one of them"
    ]


def test_ranks_that_do_not_wait_for_their_end_are_not_spawned(probed: dict[str, Features]) -> None:
    """Rule 3: memory would be promised while they hold it."""
    features = msgspec.structs.replace(probed["1.4.0rc1"], mpi_session=("self", "n_workers"))
    assert any("launch: mpiexec" in problem for problem in problems(DEMAND, features, settings()))
    assert problems(DEMAND, features, settings(launch="mpiexec")) == []


def test_graphs_cover_the_concurrency_with_little_padding() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(64) == [1, 2, 4, 8, 12, 18, 27, 40, 60, 64]
    assert graph_sizes(5)[-1] == 5


def test_ranks_over_nodes_are_launched_around_the_server() -> None:
    here = settings(launch="mpiexec", python=sys.executable)
    command = server_command(here, Path("c.json"), [("a", 4), ("b", 4)])
    assert command[1:3] == ["-n", "8"]
    assert command[command.index("--host") + 1] == "a:4,b:4"
    assert command[-5].endswith("/trtllm-llmapi-launch")
    with pytest.raises(YardError, match="launch: mpiexec"):
        server_command(settings(), Path("c.json"), [("a", 4), ("b", 4)])


def test_nothing_of_the_site_leaks_into_the_environment() -> None:
    """Rule 15: its Ray orchestrator hands its whole environment to every rank."""
    site = {"PATH": "/bin", "HOME": "/root", "MODELYARD_RANK_SECRET": "x", "PYTHONPATH": "/site", "RAY_AUTH_TOKEN_PATH": "/t"}
    made = environment(settings(environment={"NCCL_DEBUG": "WARN"}), site, [2, 3])
    assert made["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made["NCCL_DEBUG"] == "WARN"
    assert not {"MODELYARD_RANK_SECRET", "PYTHONPATH", "RAY_AUTH_TOKEN_PATH"} & made.keys()
    assert environment(settings(), site, [0], ray_address="h:1")["RAY_AUTH_TOKEN_PATH"] == "/t"
    assert environment(settings(), {RUN_VARIABLE: "/r"}, [0])[RUN_VARIABLE] == "/r", "`yard down` would not find it"
