"""How the processes of a TensorRT-LLM model are started: command lines and environments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.api.config import EngineSpec
from gateway.api.errors import invalid
from workers.engines import trtllm

BOOT = Path(trtllm.__file__).parent / "boot.py"

# What its processes get of ours. Never the whole environment: its Ray orchestrator copies all of its own to every rank, and
# the site's has secrets in it, and paths to packages of another torch.
_PASSED = (
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MODELYARD_RUN",  # the mark by which `yard down` finds what a site started
)
_PASSED_TO_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")

# Several models share a GPU, each with communicators of its own: NVLink multicast objects are few, so none takes them.
_SHARING = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# In containers all is root's, and Open MPI asks to be told so, of each of its layers.
_AS_ROOT = {f"{layer}_ALLOW_RUN_AS_ROOT{word}": "1" for layer in ("OMPI", "PRTE") for word in ("", "_CONFIRM")}


def boot_command(settings: EngineSpec, command: str, *arguments: str) -> list[str]:
    if settings.python is None:
        raise invalid(
            "this site has no TensorRT-LLM: set engines.trtllm.python in the Site document to the interpreter of an environment "
            "that has it (see ops/trtllm.md), then `yard up` again",
            field="engines.trtllm.python",
        )
    return [settings.python, str(BOOT), command, *arguments]


def server_command(settings: EngineSpec, config: Path, nodes: Sequence[tuple[str, int]]) -> list[str]:
    """The server of one model. `nodes`: (host, ranks there), the server's own first.

    With `launch: mpiexec` the library's own launcher runs the server beside rank 0, and its workers as the other ranks.
    """
    server = boot_command(settings, "serve", str(config))
    world = sum(count for _, count in nodes)
    if settings.orchestrator == "ray" or (settings.launch == "spawn" and len(nodes) == 1):
        return server
    if settings.launch == "spawn":
        hosts = ", ".join(f"{host}: {count}" for host, count in nodes)
        raise invalid(f"a group over several nodes ({hosts}) cannot spawn its ranks; set engines.trtllm.launch: mpiexec")
    if world == 1:
        return server
    binaries = Path(server[0]).parent
    beside = binaries / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise invalid(f"no mpiexec beside {server[0]} or on PATH: install Open MPI in TensorRT-LLM's environment")
    placed = ["--host", ",".join(f"{host}:{count}" for host, count in nodes)] if len(nodes) > 1 else ["--oversubscribe"]
    launch = [mpiexec, "-n", str(world), "--allow-run-as-root", "--bind-to", "none", *placed]
    return [*launch, str(binaries / "trtllm-llmapi-launch"), *server]


def environment(settings: EngineSpec, base: Mapping[str, str], devices: Sequence[int], ray_address: str = "") -> dict[str, str]:
    """`devices`: of this node, by rank. Indices, as the library parses them as numbers: no UUIDs, no MIG names."""
    names = (*_PASSED, *(_PASSED_TO_RAY if ray_address else ()))
    passed = {name: base[name] for name in names if name in base}
    binaries = str(Path(settings.python).parent) if settings.python else ""
    return {
        **passed,
        **_SHARING,
        "PATH": f"{binaries}:{base.get('PATH', '/usr/bin:/bin')}",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, dict.fromkeys(devices))),
        **(_AS_ROOT if os.geteuid() == 0 else {}),
        "TRTLLM_MPI_IDENTITY_TIMEOUT": str(int(settings.start_timeout_s)),
        **({"RAY_ADDRESS": ray_address} if ray_address else {}),
        **settings.environment,
    }
