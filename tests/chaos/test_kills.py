"""kill -9 of each kind of process under load: it heals without a hand, and no request hangs (rules 9 and 11)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from house import House, ray_processes

from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import SiteStatus

pytestmark = pytest.mark.site

MODELS = ("smollm2", "smollm2-pp2")
# A request is given this long; none may still be open after it. Healing is bounded apart from this.
REQUEST_TIMEOUT_S = 60
ALLOWED = {"answered", "UNAVAILABLE"}


class Load:
    """Streams short answers from both models, and counts how each request ended."""

    def __init__(self, house: House) -> None:
        self.ends: Counter[str] = Counter()
        self.longest_s = 0.0
        self.answered = dict.fromkeys(MODELS, 0)
        self._house = house
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(model,)) for model in MODELS for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_TIMEOUT_S + 5)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def _ask(self, model: str) -> None:
        channel, stub = self._house.inference()
        with channel:
            while not self._stop.is_set():
                began_s = time.monotonic()
                try:
                    request = pb.GenerateRequest(model=model, prompt="Count: one, two,", max_tokens=24, ignore_eos=True)
                    chunks = list(stub.GenerateStream(request, timeout=REQUEST_TIMEOUT_S))
                    assert chunks[-1].usage.completion_tokens == 24
                    self.ends["answered"] += 1
                    self.answered[model] += 1
                except grpc.RpcError as error:
                    self.ends[error.code().name] += 1
                    time.sleep(0.05)
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)


@pytest.fixture
def loaded(house: House) -> Iterator[Load]:
    house.wait_ready(*MODELS)
    with Load(house) as load:
        end = time.monotonic() + 30
        while not all(load.answered.values()):
            assert time.monotonic() < end, f"no answers before the kill: {load.ends}"
            time.sleep(0.1)
        yield load
    assert set(load.ends) <= ALLOWED, load.ends


def heals(house: House, load: Load, broken: str, within_s: float) -> None:
    """All models are ready again, and answer."""
    took_s = house.wait_ready(*MODELS, timeout_s=within_s)
    before = dict(load.answered)
    end = time.monotonic() + 30
    while any(load.answered[model] <= before[model] for model in MODELS):
        assert time.monotonic() < end, f"no answer after {broken} was killed: {load.ends}"
        time.sleep(0.1)
    print(f"{broken}: ready after {took_s:.1f} s, longest request {load.longest_s:.1f} s, {dict(load.ends)}")


def test_a_rank(house: House, loaded: Load) -> None:
    """Rule 11: one rank lost, the group restarts as one."""
    before = house.status().pools[0]
    left_by_mpi = segments(house)
    assert left_by_mpi
    psutil.Process(before.ranks[1].pid).kill()

    def replaced(status: SiteStatus) -> bool:
        return bool(status.pools) and {r.pid for r in status.pools[0].ranks}.isdisjoint({r.pid for r in before.ranks})

    house.wait_until("all ranks are new", replaced, 60)
    heals(house, loaded, "rank", 90)
    assert house.status().pools[0].incarnation == before.incarnation, "the driver outlives its ranks"
    assert len(segments(house)) == len(left_by_mpi), "killed ranks leave their shared memory behind"


def test_the_driver(house: House, loaded: Load) -> None:
    """Ranks outlive the driver: the new one adopts them, and nothing is loaded again."""
    before = house.status().pools[0]
    psutil.Process(before.pid).kill()
    house.wait_until("a new driver", lambda s: bool(s.pools) and s.pools[0].incarnation != before.incarnation, 60)
    heals(house, loaded, "driver", 60)
    assert not [switch for switch in house.status().pools[0].switches if switch.path == "load"], "weights were read again"
    assert {rank.pid for rank in house.status().pools[0].ranks} == {rank.pid for rank in before.ranks}


def test_a_gateway(house: House, loaded: Load) -> None:
    """The other gateway on the same port goes on; Serve starts a new one."""
    before = {gateway.gateway: gateway.pid for gateway in house.status().gateways}
    assert len(before) == 2
    psutil.Process(next(iter(before.values()))).kill()
    house.wait_until("two gateways", lambda s: len(s.gateways) == 2 and {g.pid for g in s.gateways} != set(before.values()), 60)
    heals(house, loaded, "gateway", 30)


def test_the_controller(house: House, loaded: Load) -> None:
    """No stream notices; a new controller takes the lease with a higher fencing token (rule 1)."""
    before = house.status().controller
    assert before is not None
    ended_before = loaded.ends["UNAVAILABLE"]
    psutil.Process(before.pid).kill()
    house.wait_until("a new controller", lambda s: s.controller is not None and s.controller.fence > before.fence, 60)
    heals(house, loaded, "controller", 30)
    assert loaded.ends["UNAVAILABLE"] == ended_before, "a controller's death must not fail a request"


def test_rays_head(house: House, loaded: Load) -> None:
    """No request notices; the next head knows what the killed one knew, so that what dies after it comes back, too."""
    (head,) = [process for process in house.processes() if process.name() == "gcs_server"]
    ended_before = loaded.ends["UNAVAILABLE"]
    head.kill()
    house.wait_until("a new head", lambda _: any(process.name() == "gcs_server" for process in house.processes()), 30)
    heals(house, loaded, "Ray's head", 30)
    assert loaded.ends["UNAVAILABLE"] == ended_before


def test_the_serve_controller(house: House, loaded: Load) -> None:
    (controller,) = ray_processes(house, "ServeController")
    controller.kill()
    heals(house, loaded, "Serve controller", 60)


def test_valkey(house: House, loaded: Load) -> None:
    """Rule 12: streams do not notice, and the embedded server is back with what it held."""
    (server,) = psutil.Process(house.state.sessions["valkey"].pid).children()
    revision = house.status().revision
    ended_before = loaded.ends["UNAVAILABLE"]
    server.kill()
    house.wait_until("the store answers again", lambda s: s.redis == "ok" and s.revision == revision, 30)
    assert house.yard("route", "switch", "chat", "--to", "smollm2-pp2", server=True).returncode == 0
    assert house.yard("route", "rollback", "chat", server=True).returncode == 0
    assert loaded.ends["UNAVAILABLE"] == ended_before
    assert not server.is_running()


def test_an_upgrade(house: House, loaded: Load) -> None:
    """No process is the same afterwards but the ranks, and nothing was loaded again."""
    before = house.status()
    upgraded = house.yard("upgrade", timeout_s=170)
    assert upgraded.returncode == 0, upgraded.stderr
    heals(house, loaded, "upgrade", 30)
    after = house.status()
    assert after.controller is not None
    assert before.controller is not None
    assert after.controller.pid != before.controller.pid
    assert {gateway.pid for gateway in after.gateways}.isdisjoint({gateway.pid for gateway in before.gateways})
    assert len(after.gateways) == 2
    assert after.pools[0].pid != before.pools[0].pid
    assert [rank.pid for rank in after.pools[0].ranks] == [rank.pid for rank in before.pools[0].ranks]


def test_everything(house: House) -> None:
    """What `yard up` finds after a power cut, short of the disk: it clears the remains and starts what was desired."""
    revision = house.status().revision
    killed = [*house.processes(), *psutil.Process(house.state.sessions["valkey"].pid).children()]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, timeout=10)
    again = house.up()
    assert again.returncode == 0, f"{again.stdout}\n{again.stderr}"
    house.wait_ready(*MODELS)
    assert house.status().revision >= revision


def segments(house: House) -> list[Path]:
    return list(house.home.shared_memory_dir.rglob("sm_segment*"))
