"""A whole gateway without Redis or Ray: real servers on free ports, a site view that the test fills in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from scripted_pool import SECRET, ScriptedPool

from gateway.api.config import ModelSpec
from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.records import DesiredObject
from gateway.link.link_set import LinkSet
from gateway.servers.admin_guard import AdminAccess
from gateway.servers.capacity import Capacity
from gateway.servers.generation_path import GenerationPath
from gateway.servers.health_service import HealthService
from gateway.servers.inference_service import InferenceService
from gateway.servers.kserve_repository import KserveRepository
from gateway.servers.kserve_service import KserveService
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.openai_http import openai_app
from gateway.servers.public_servers import INFERENCE_NAME, KSERVE_NAME, PublicServers
from gateway.servers.server_metrics import ServerMetrics
from gateway.state.snapshot import ObjectKey, Observed, Snapshot
from gateway.state.view import SiteView
from gateway.text.library import TextLibrary
from gateway.text.model_text import ModelText
from gateway.text.server_text import server_text


class LoneGateway:
    """`texts` maps each model to the directory of its tokenizer."""

    def __init__(self, run_dir: Path, texts: dict[str, Path], *, defaults: dict | None = None) -> None:
        self.texts = texts
        self.defaults = defaults or {}
        self.embedding: set[str] = set()  # models that make embeddings
        self.view = SiteView()
        self.links = LinkSet(gateway="gateway-under-test", secret=SECRET)
        self.library = TextLibrary(self._load)
        self.path = GenerationPath(self.view, self.library, self.links, random.Random(7))
        self.metrics = GatewayMetrics(self.view)
        self.health = HealthService(self.path, (INFERENCE_NAME, KSERVE_NAME))
        self.links.on_server = self.health.refresh
        self.metrics.registry.register(ServerMetrics(self.links))
        self.servers = PublicServers(run_dir=run_dir, host="127.0.0.1", grpc_port=0, http_port=0)
        self.repository = KserveRepository(self.view, None)
        self.pools: dict[str, ScriptedPool] = {}
        self._objects: dict[ObjectKey, DesiredObject] = {}
        self._observed: dict = {}
        self._revision = 0
        self._channel: grpc.aio.Channel | None = None

    def _load(self, model: str, spec: ModelSpec) -> ModelText:
        if not spec.is_managed:
            return server_text(model, spec, Path())
        eos = 2
        return ModelText(
            model, self.texts[model], eos_ids=(eos,), max_context=256, defaults=self.defaults, embeds=model in self.embedding
        )

    async def start(self, *pools: ScriptedPool) -> LoneGateway:
        """Serves the models of the pools, each linked."""
        self.view.subscribe(self._follow)
        for model in self.texts:
            self.put_model(model)
        for pool in pools:
            await pool.start()
            self.observe(pool)
        self.view.set_degraded(None)
        self.health.set_accepting(True)
        inference = InferenceService(self.path, self.metrics)
        access = AdminAccess(SECRET, self.view, loopback=True)
        pages = Capacity("lone", self.path, access, None).routes()
        app = openai_app(self.path, self.metrics, self.health, pages)
        kserve = KserveService(self.path, self.metrics, self.health, self.repository, "0.0")
        await self.servers.start(inference, kserve, self.health, app, None, SECRET)
        for pool in pools:
            await self.wait_up(pool.name)
        return self

    def _follow(self) -> None:
        self.links.reconcile(self.view.pools)
        self.links.follow_servers(self.view.models)
        self.library.prefetch(self.view.models)
        self.health.refresh()

    def put_model(self, model: str, concurrency: int = 64, queue: int = 256) -> None:
        limits = {"concurrency": concurrency, "queue": queue}
        self.put("Model", model, {"source": f"file:{self.texts[model]}", "limits": limits})

    def put(self, kind: str, name: str, spec: dict) -> None:
        self._revision += 1
        key = ObjectKey(kind, name)
        generation = self._objects[key].generation + 1 if key in self._objects else 1
        manifest = {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self._objects[key] = DesiredObject(kind, name, generation, self._revision, manifest, 1_700_000_000.0)
        self.view.apply_desired(Snapshot(self._revision, dict(self._objects), {}))
        assert not self.view.rejected, self.view.rejected

    def delete(self, kind: str, name: str) -> None:
        self._revision += 1
        del self._objects[ObjectKey(kind, name)]
        self.view.apply_desired(Snapshot(self._revision, dict(self._objects), {}))

    def observe(self, pool: ScriptedPool, **record) -> None:
        """A heartbeat of the pool."""
        self.pools[pool.name] = pool
        self._observed[pool.name] = pool.record(**record)
        self.view.apply_observed(Observed(dict(self._observed), {}, None))

    def forget(self, pool: ScriptedPool) -> None:
        """Its heartbeat expired."""
        del self._observed[pool.name]
        self.view.apply_observed(Observed(dict(self._observed), {}, None))

    async def wait_up(self, pool: str, up: bool = True) -> None:
        async with asyncio.timeout(10):
            while self.links._links[pool].up is not up:
                await self.links.wait_change(1.0)

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.servers.grpc_port}", options=CLIENT_OPTIONS)
        return self._channel

    @property
    def inference(self) -> InferenceStub:
        return InferenceStub(self.channel)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.servers.http_port}"

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.servers.stop(0.0)
        await self.path.shadows.close()
        await self.links.close()
        for pool in self.pools.values():
            await pool.stop()


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """For what announces itself nowhere."""
    for _ in range(int(timeout_s * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"the condition did not hold within {timeout_s} s")


def ids_of(directory: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]
