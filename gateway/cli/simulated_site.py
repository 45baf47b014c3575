"""A site directory as placement sees it, without a running site: what `yard simulate` replays a trace against."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.api import manifest
from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import ModelSpec, PoolSpec
from gateway.api.errors import invalid
from gateway.controller.model_requests import model_request
from placement.hardware import hardware_of
from placement.simulated_group import Job
from placement.types import Device, ModelRequest, Snapshot

NODE_DEVICES = 8
_USABLE = 0.95  # of a card's memory: the rest is the context of the process


def read_site(files: Iterable[Path], cache_dir: Path, gpu: str) -> Snapshot:
    """YardError when the directory has no pool or model, or a checkpoint cannot be read. `gpu`: the type of cards of cuda
    pools.
    """
    documents = manifest.read(list(files))
    devices: list[Device] = []
    models: list[ModelRequest] = []
    for document in documents:
        name, spec = document.manifest.name, document.manifest.spec
        if isinstance(spec, PoolSpec):
            devices += _devices(name, spec, gpu)
        elif isinstance(spec, ModelSpec) and spec.is_managed:
            models.append(model_request(name, spec, open_checkpoint(spec.source, cache_dir)))
    if not devices or not models:
        raise invalid("the site has no pool or no model; `--site` takes a directory as `yard apply -f` does")
    return Snapshot(tuple(devices), tuple(models))


def _devices(pool: str, spec: PoolSpec, gpu: str) -> Iterable[Device]:
    type_ = gpu if spec.device == "cuda" else ""
    memory = spec.memory
    if memory is None:
        if not gpu:
            raise invalid(f"pool `{pool}` has no `memory`: say with --gpu what its cards are, for example --gpu H100")
        memory = int(hardware_of("cuda", gpu).memory_bytes * _USABLE)
    for rank in range(spec.devices):
        yield Device(
            pool=pool,
            rank=rank,
            node=f"{pool}-{rank // NODE_DEVICES}",
            kind=spec.device,
            capacity_bytes=memory,
            cordoned=rank in spec.cordoned,
            standby_bytes=spec.standby,
            engines=spec.engines,
            type=type_,
        )


class GateQueue:
    """The gateway's own queue, for one model of a simulation whose requests are all of one tenant."""

    def __init__(self, limit: int) -> None:
        self._queue: FairQueue[Job] = FairQueue()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, job: Job, cost: float, now_s: float) -> Job | None:
        refused = self._queue.push(Waiting(job, "", 100.0, 0, cost, now_s), self._limit)
        return None if refused is None else refused.who

    def pop(self, now_s: float) -> Job | None:
        waiting = self._queue.pop(now_s)
        return None if waiting is None else waiting.who


def queue_of(request: ModelRequest) -> GateQueue:
    return GateQueue(request.queue * max(request.replicas, 1))
