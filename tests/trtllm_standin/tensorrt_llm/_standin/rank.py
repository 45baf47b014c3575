"""What a rank does: hold memory on its GPU, answer to every step, crash when a test says so."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tensorrt_llm_standin_gpu import ROOT, SETTINGS, hold

CONTEXT_BYTES = 100 * 2**20  # what CUDA and NCCL keep whatever the model does
WORKSPACE_BYTES = 1100 * 2**20


def visible_devices() -> list[int]:
    """GPU UUIDs and MIG names break the library, which parses integers."""
    return [int(index) for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index.strip()]


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._device = visible_devices()[rank % len(visible_devices())]
        self._bytes = 0

    def load(self, plan: dict[str, Any]) -> int:
        """Its share of the checkpoint, KV, and what is always there."""
        time.sleep(SETTINGS.get("load_s", 0.1))
        weights = sum(path.stat().st_size for path in Path(plan["model"]).glob("*.safetensors")) // plan["world"]
        self._bytes = weights + plan["kv_bytes"] + CONTEXT_BYTES + WORKSPACE_BYTES
        hold(self._device, self._bytes)
        return os.getpid()

    def step(self) -> None:
        crash = ROOT / f"crash-{self.rank}"
        if crash.exists():
            crash.unlink()
            os._exit(99)

    def release(self) -> None:
        hold(self._device, CONTEXT_BYTES)

    def resume(self) -> None:
        hold(self._device, self._bytes)

    def end(self) -> None:
        hold(self._device, 0)


def serve(address: str, key: bytes, rank: int) -> None:
    """A rank in a process of its own: calls come over a connection to the library's process, until it closes."""
    from multiprocessing.connection import Client

    worker = Rank(rank)
    with Client(address, authkey=key) as connection:
        connection.send_bytes(str(rank).encode())
        while True:
            try:
                method, arguments = json.loads(connection.recv_bytes())
            except EOFError:
                worker.end()
                return
            try:
                answer = {"value": getattr(worker, method)(*arguments)}
            except RuntimeError as error:
                answer = {"error": str(error)}
            connection.send_bytes(json.dumps(answer).encode())
