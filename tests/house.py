"""A whole site for tests: real Ray, real Valkey, real Serve applications, started and stopped by the `yard` command itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil

from gateway.api.errors import YardError
from gateway.api.grpc_options import CLIENT_OPTIONS, RETRY_OPTION
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.records import GroupRecord, SiteStatus
from gateway.site import state
from gateway.site.client import SiteClient
from gateway.site.home import HOME_VARIABLE, Home

UP_TIMEOUT_S = 240


class House:
    """`home` is its MODELYARD_HOME. Ports are free ones."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = Home(home)
        self.options = options

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        ports = ("--grpc-port", "0", "--http-port", "0", "--dashboard-port", "0")
        return self.yard("up", *ports, *self.options, *options, timeout_s=UP_TIMEOUT_S)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.yard("down", timeout_s=90)

    def yard(self, *arguments: str, timeout_s: float = 60, server: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs the command line. `server`: against this house's gateway."""
        environment = {**os.environ, HOME_VARIABLE: str(self.home.path)}
        if server:
            environment["MODELYARD_SERVER"] = self.grpc_address
        command = [sys.executable, "-m", "gateway.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)

    @property
    def state(self) -> state.SiteState:
        found = state.load(self.home)
        assert found is not None, "the house is not up"
        return found

    @property
    def grpc_address(self) -> str:
        return self.state.grpc_address

    @property
    def http_url(self) -> str:
        return f"http://{self.state.http_address}"

    @contextlib.contextmanager
    def client(self) -> Iterator[SiteClient]:
        with SiteClient(self.grpc_address, self.home.secrets().site) as client:
            yield client

    def status(self) -> SiteStatus:
        with self.client() as client:
            return client.status()

    def groups(self, model: str) -> list[GroupRecord]:
        return [group for pool in self.status().pools for group in pool.groups if group.model == model]

    def inference(self) -> tuple[grpc.Channel, InferenceStub]:
        channel = grpc.insecure_channel(self.grpc_address, options=[*CLIENT_OPTIONS, RETRY_OPTION])
        return channel, InferenceStub(channel)

    def wait_until(self, what: str, condition: Callable[[SiteStatus], bool], timeout_s: float = 60) -> float:
        """Seconds until `condition` held of the status; an unreachable gateway only counts as not yet."""
        began_s = time.monotonic()
        last = "no answer yet"
        while time.monotonic() - began_s < timeout_s:
            try:
                status = self.status()
            except YardError as error:
                last = str(error)
            else:
                if condition(status):
                    return time.monotonic() - began_s
                last = json.dumps([[(g.model, g.state, g.reason) for g in pool.groups] for pool in status.pools])
            time.sleep(0.1)
        raise TimeoutError(f"{what} did not happen within {timeout_s} s: {last}")

    def wait_ready(self, *models: str, timeout_s: float = 90) -> float:
        return self.wait_until(f"{', '.join(models)} ready", lambda status: all(is_ready(status, m) for m in models), timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this house: its environment names its home or its run directory."""
        marks = {str(self.home.path), str(self.home.run_dir)}
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = [*process.cmdline(), *process.environ().values()]
                if any(mark in word for word in words for mark in marks):
                    found.append(process)
        return found


def is_ready(status: SiteStatus, model: str) -> bool:
    """The heartbeats are fresh by themselves: an expired one is not in the status."""
    return any(group.model == model and group.state == "ready" for pool in status.pools for group in pool.groups)


def ray_processes(house: House, title: str) -> list[psutil.Process]:
    """Serve replicas and actors by the title that Ray gives their process, for example `ServeReplica:gateway`."""
    return [process for process in house.processes() if any(title in word for word in process.cmdline())]
