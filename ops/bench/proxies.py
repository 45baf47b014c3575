"""What stands before the scripted engine: a gateway and a plain forwarder on Ray Serve, and LiteLLM's proxy."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import psutil

from gateway.api.records import GatewayRecord, Keys
from gateway.site.ray_head import free_ports
from ops.bench.scripted_engine import MODEL, SOURCE, EngineProcess
from ops.bench.scripted_site import ROOT, SITE, Site, apply, until_answered

READY_S = 90.0


@dataclass(frozen=True)
class Way:
    """`url` of one that is asked over HTTP. `processes`: those that a request passes through."""

    processes: Callable[[], list[psutil.Process]]
    address: str = ""
    url: str = ""


@asynccontextmanager
async def gateway_on_ray(site: Site, engine: EngineProcess, directory: Path) -> AsyncIterator[dict[str, Way]]:
    token = directory / "ray_token"
    token.write_text(secrets.token_hex(32))
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    [port] = free_ports(1)
    arguments = ("-m", "ops.bench.on_ray", str(directory), site.redis_url, engine.address, str(port))
    process = await _start(sys.executable, *arguments, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError("Ray did not start; its output is above")
        keys = Keys(SITE)
        [name] = cast("set[bytes]", await site.redis.smembers(keys.gateways))
        raw = cast("bytes", await site.redis.get(keys.gateway(name.decode())))
        gateway = msgspec.json.decode(raw, type=GatewayRecord)
        await apply(gateway.grpc_endpoint, ("Model", MODEL, {"source": SOURCE, "limits": {"concurrency": 256}}))
        await until_answered(gateway.grpc_endpoint, MODEL)

        def of_gateway() -> list[psutil.Process]:
            return [psutil.Process(gateway.pid)]

        def of_serve() -> list[psutil.Process]:
            below = psutil.Process(process.pid).children(recursive=True)
            return [each for each in below if any(part in " ".join(each.cmdline()) for part in ("ProxyActor", "forwarder"))]

        yield {
            "gateway": Way(of_gateway, address=gateway.grpc_endpoint),
            "gateway-http": Way(of_gateway, url=f"http://{gateway.http_endpoint}"),
            "serve": Way(of_serve, address=f"127.0.0.1:{port}"),
        }
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def litellm(python: str, engine: EngineProcess, directory: Path) -> AsyncIterator[Way]:
    """One worker, nothing switched on that is not by default, nothing looked up on the network."""
    config = directory / "litellm.yaml"
    config.write_text(
        f"""
model_list:
  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: "{engine.url}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}  # as the gateway's: no keys, and on loopback
"""
    )
    [port] = free_ports(1)
    command = [str(Path(python).parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    with (directory / "litellm.log").open("wb") as log:
        process = await _start(*command, "--num_workers", "1", environment=quiet, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_S):
            while not await _alive(session, f"{url}/health/liveliness"):
                if process.returncode is not None:
                    raise RuntimeError(f"LiteLLM ended: {(directory / 'litellm.log').read_text()[-2000:]}")
                await asyncio.sleep(0.2)

        def all_of_it() -> list[psutil.Process]:
            root = psutil.Process(process.pid)
            return [root, *root.children(recursive=True)]

        yield Way(all_of_it, url=url)
    finally:
        with suppress(ProcessLookupError):
            process.kill()  # asked to end, it first waits for its clients
        await process.wait()


async def _alive(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _start(*command: str, environment: dict[str, str], **streams: object) -> asyncio.subprocess.Process:
    env = {**os.environ, **environment}
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, **streams)  # type: ignore[arg-type]
