"""`yard up`: from nothing, or from a stopped site, to a gateway that answered a canary prompt. All or nothing.

What takes long runs at once: Ray's start, the import of its client, Valkey, and the opening of the models' files. Every
process is in the state file before it can do anything, so that a failure, an interrupt or a crash leaves none behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import psutil

from gateway.api.address import node_address
from gateway.api.config import EngineSpec
from gateway.api.errors import ErrorCode, YardError, invalid
from gateway.api.proto import inference_pb2 as inference
from gateway.api.redis_link import with_site
from gateway.api.runtime import Runtime
from gateway.servers.tls import ServerTls
from gateway.site import client_tls, desired, down, preflight, ray_head, ray_health, ray_watch, readiness, state, valkey
from gateway.site.board import Board
from gateway.site.client import SiteClient
from gateway.site.home import Home
from gateway.site.processes import Mark, is_alive, mark
from gateway.site.site_files import SiteFiles

# A model that stays failed for so long, or fails a second time, fails the whole start.
_FAILURE_GRACE_S = 5.0
_POLL_S = 0.25
_CANARY_TIMEOUT_S = 60.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANARY_PROMPT = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Canary:
    route: str
    model: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Up:
    """What `yard up` reports at its end."""

    state: state.SiteState
    canary: Canary | None
    was_running: bool
    kept: tuple[str, ...]  # objects that differ from their files because ops changed them since
    deleted: tuple[str, ...]  # objects of unchanged files that ops deleted since
    notes: tuple[str, ...]  # what follows from the objects that were written


def up(home: Home, site: SiteFiles, board: Board, *, ray_address: str | None, wait_s: float) -> Up:
    """YardError when the site does not come up; then nothing that this call started is left."""
    home.create()
    found = state.load(home)
    if found is not None:
        if _is_running(found):
            return _verify(home, found, site, board, wait_s)
        with board.step("leftovers", f"of a {found.phase} site that ended without `yard down`"):
            down.stop_processes(home, found)
        home.create()  # the leftovers took the run directories with them
    preflight_all(home, site, board, ray_address)
    start = _Start(home, site, board, ray_address, wait_s)
    try:
        return start.run()
    except BaseException:
        with board.step("cleaning up", "stopping what was started"), _uninterrupted():
            start.abandon()
        raise


def preflight_all(home: Home, site: SiteFiles, board: Board, ray_address: str | None) -> None:
    listen = site.spec.listen
    with board.step("checks") as step:
        preflight.check_disk(home.path, home.run_dir)
        ports = {"grpc-port": listen.grpc_port, "http-port": listen.http_port, "dashboard-port": listen.dashboard_port}
        preflight.check_ports(listen.host, ports)
        if site.tls_files is not None:
            ServerTls(site.tls_files)
        preflight.check_memory(site.documents)
        if site.spec.redis:
            asyncio.run(preflight.check_redis(with_site(site.spec.redis, site.name)))
        if ray_address is not None:
            preflight.check_ray(ray_address)
        step.note = "ports, disk, memory" + (", Redis" if site.spec.redis else "")


def _is_running(found: state.SiteState) -> bool:
    if found.boot_id != state.boot_id():
        return False
    if found.phase == "starting" and is_alive(found.owner):
        raise invalid(f"another `yard up` (pid {found.owner.pid}) is starting site {found.site}; wait for it, or stop it")
    return found.phase == "running" and down.is_complete(found)


class _Start:
    """One start, and what it has put into the world so far (`state`)."""

    def __init__(self, home: Home, site: SiteFiles, board: Board, ray_address: str | None, wait_s: float) -> None:
        self._home, self._site, self._board, self._ray_address = home, site, board, ray_address
        self._jobs = ThreadPoolExecutor(max_workers=4, thread_name_prefix="yard-up")
        self._state_lock = threading.Lock()
        self._is_connected = False
        self._is_abandoned = False
        self._deadline = time.monotonic() + wait_s
        self._wait_s = wait_s
        listen = site.spec.listen
        ports = [port or free for port, free in zip(_ports(site), ray_head.free_ports(3), strict=True)]
        self.state = state.save(
            home,
            state.SiteState(
                site=site.name,
                site_dir=str(site.directory),
                phase="starting",
                boot_id=state.boot_id(),
                owner=mark(os.getpid()),
                ray_is_ours=ray_address is None,
                redis_is_ours=site.spec.redis is None,
                bind_host=listen.host,
                grpc_port=ports[0],
                http_port=ports[1],
                dashboard_port=ports[2],
                redis_url=with_site(site.spec.redis, site.name) if site.spec.redis else "",
                valkey_port=ray_head.free_ports(1)[0],
                tls=client_tls.of_site(site.spec.listen.tls, site.directory),
            ),
        )

    def run(self) -> Up:
        try:
            with ray_watch.watched(self._home, self._board, self._refuse_ended_ray):
                return self._run()
        except Exception:
            self._refuse_ended_ray()  # what fails for want of Ray's processes says all but that
            raise

    def _refuse_ended_ray(self) -> None:
        ray_health.refuse_ended(self._home, self.state, "start")

    def _run(self) -> Up:
        secrets = self._home.secrets()
        self._start_servers()
        from gateway.site import deployment

        with _interrupts_held():  # half of a Ray client cannot be ended, and takes the process with it
            deployment.connect(self.state.ray_address)
            self._is_connected = True
        with SiteClient(self.state.grpc_address, secrets.site, tls=self.state.tls) as client:
            self._deploy(client)
            result = self._bring_up(client)
        deployment.disconnect()
        self._is_connected = False
        return result

    def _deploy(self, client: SiteClient) -> None:
        from gateway.site import deployment

        with self._board.step("applications", "starting Serve") as step:
            if self.state.redis_is_ours and len(deployment.node_addresses()) > 1:
                raise invalid(
                    "this Ray has nodes on other machines, which cannot reach the embedded Valkey; give a shared one with --redis"
                )
            deployment.deploy(runtime_of(self._home, self.state, self._site), self._site.spec.gateways)
            self._wait_for_gateway(client)
            step.note = "gateway and controller run"

    def _start_servers(self) -> None:
        from gateway.site import deployment

        environment = ray_head.environment(self._home, loopback=self._site.is_loopback) if self._ray_address is None else {}
        work: list[Callable[[], None]] = [lambda: deployment.load(environment), self._check_models]
        if self.state.redis_is_ours:
            work.append(self._start_valkey)
        if self._ray_address is None:
            work.append(self._start_ray)
        else:
            self._change_state(ray_address=self._ray_address)
        done, _ = wait([self._jobs.submit(job) for job in work], return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()

    def _check_models(self) -> None:
        with self._board.step("models", "reading headers"):
            preflight.check_models(self._site.documents, self._home.cache_dir)

    def _start_valkey(self) -> None:
        with self._board.step("Valkey") as step:
            leader = valkey.start(self._home, self.state.valkey_port, self._home.secrets().valkey, self._record("valkey"))
            step.note = f"127.0.0.1:{self.state.valkey_port}, process {leader.pid}"

    def _start_ray(self) -> None:
        with self._board.step("Ray") as step:
            address = ray_head.start(
                self._home,
                node_address="127.0.0.1" if self._site.is_loopback else node_address(),
                dashboard_port=self.state.dashboard_port,
                pool_mib=psutil.virtual_memory().total >> 20,
                on_start=self._record("ray"),
            )
            if self._is_abandoned:
                raise YardError(ErrorCode.CANCELLED, "Ray was stopped while it started")
            self._change_state(ray_address=address)
            step.note = f"{address}, dashboard 127.0.0.1:{self.state.dashboard_port}"

    def _record(self, name: str) -> Callable[[Mark], None]:
        def record(leader: Mark) -> None:
            with self._state_lock:
                self.state = state.save(self._home, self.state.with_session(name, leader))

        return record

    def _change_state(self, **changes: object) -> None:
        with self._state_lock:
            self.state = state.save(self._home, msgspec.structs.replace(self.state, **changes))

    def abandon(self) -> None:
        """Ends everything this start began. A thread that was just starting a server sees it end, and is waited for."""
        self._is_abandoned = True
        if self._is_connected:
            from gateway.site import deployment

            if not self.state.ray_is_ours:
                deployment.undeploy(whole_serve=False)
            # A client whose node ends under it would end this process with it.
            deployment.disconnect()
        down.stop_processes(self._home, self.state)
        self._jobs.shutdown(wait=True, cancel_futures=True)
        down.stop_processes(self._home, self.state)

    def _wait_for_gateway(self, client: SiteClient) -> None:
        from gateway.site import deployment

        looked_s = time.monotonic()
        while not _answers(client):
            if time.monotonic() - looked_s > ray_health.LOOK_S:
                self._refuse_ended_ray()
                deployment.check()
                self._board.update("applications", deployment.starting())
                looked_s = time.monotonic()
            self._check_deadline("the gateway does not answer yet")
            time.sleep(_POLL_S)

    def _bring_up(self, client: SiteClient) -> Up:
        with self._board.step("desired state") as step:
            reconciled = desired.reconcile(client, self._home, self._site.documents)
            step.note = f"{', '.join(reconciled.written)} written" if reconciled.written else "as it was"
        self._site = self._site.without(reconciled.deleted)
        self._wait_for_models(client)
        canary = ask_canary(client, self._site.default_route, self._board)
        self._change_state(phase="running")
        return Up(self.state, canary, was_running=False, kept=reconciled.kept, deleted=reconciled.deleted, notes=reconciled.notes)

    def _wait_for_models(self, client: SiteClient) -> None:
        from gateway.site import deployment

        watch = readiness.FailureWatch(_FAILURE_GRACE_S)
        looked_s = time.monotonic()
        while True:
            judged = readiness.judge(client.status(), self._site.pools(), self._site.replicas())
            show(self._board, judged)
            if judged.is_ready:
                return
            now_s = time.monotonic()
            if final := watch.final(judged.failures, now_s):
                raise YardError(ErrorCode.INTERNAL, "\n".join(final))
            if now_s - looked_s > ray_health.LOOK_S:
                self._refuse_ended_ray()
                deployment.check()
                looked_s = now_s
            self._check_deadline(judged.missing)
            time.sleep(_POLL_S)

    def _check_deadline(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            logs = self._home.run_dir / "ray" / "session_latest" / "logs" / "serve"
            raise YardError(ErrorCode.DEADLINE, f"not up after {self._wait_s:.0f} s: {what} (logs: {logs}; more time: --wait-s)")


def runtime_of(home: Home, found: state.SiteState, site: SiteFiles) -> Runtime:
    """What every process of the site is told."""
    secrets = home.secrets()
    return Runtime(
        site=site.name,
        redis_url=found.redis_url or valkey.url(found.valkey_port, secrets.valkey),
        secret=secrets.site,
        cache_dir=str(home.cache_dir),
        run_dir=str(home.run_dir),
        bind_host="127.0.0.1" if site.is_loopback else "node",
        grpc_port=found.grpc_port,
        http_port=found.http_port,
        trtllm=site.spec.engines.get("trtllm", EngineSpec()).model_dump_json(),
        quotas_without_redis=site.spec.quotas_without_redis,
        tls=site.tls_files,
        internal_tls=site.has_internal_tls,
        max_message_bytes=site.spec.listen.max_message,
        max_header_bytes=site.spec.listen.max_headers,
        streams_per_client=site.spec.listen.streams_per_client,
        ray_grows=not found.ray_is_ours,
    )


def show(board: Board, judged: readiness.Readiness) -> None:
    for line in judged.lines:
        board.update(line.subject, line.note, line.fraction)
        if line.is_done:
            board.end(line.subject, line.note)


def ask_canary(client: SiteClient, route: str | None, board: Board) -> Canary | None:
    """A real prompt through the gateway. None where the site has no route, or asks for a key."""
    if route is None:
        return None
    with board.step("canary", f"asking {route}: {CANARY_PROMPT}") as step:
        began_s = time.monotonic()
        request = inference.ChatRequest(
            model=route,
            messages=[inference.Message(role="user", content=CANARY_PROMPT)],
            max_tokens=16,
            sampling=inference.Sampling(temperature=0.0),
        )
        try:
            answer = client.chat(request, _CANARY_TIMEOUT_S)
        except YardError as error:
            if error.code is not ErrorCode.UNAUTHENTICATED:
                raise
            # Each model has answered its own canary before it serves; this one would only show the way through the gateway.
            step.note = f'not asked, because requests need an API key here; try `yard run {route} --api-key KEY "Hello"`'
            return None
        text = answer.choices[0].text.strip() if answer.choices else ""
        if not text:
            raise YardError(
                ErrorCode.INTERNAL, f"route {route} answered the canary prompt with nothing; see `yard describe route {route}`"
            )
        step.note = f"{route}: {text!r}"
        return Canary(route, answer.model, text, time.monotonic() - began_s)


def _verify(home: Home, found: state.SiteState, site: SiteFiles, board: Board, wait_s: float) -> Up:
    """The site runs already: writes what changed in its files, and says whether it serves."""
    if (found.site, found.site_dir) != (site.name, str(site.directory)):
        raise invalid(
            f"site {found.site} ({found.site_dir}) runs in this home; take it down with `yard down`, "
            "or set MODELYARD_HOME to run a second site beside it"
        )
    refuse_other_ports(found, site)
    with SiteClient(found.grpc_address, home.secrets().site, tls=found.tls) as client:
        with board.step("desired state") as step:
            reconciled = desired.reconcile(client, home, site.documents)
            step.note = f"{', '.join(reconciled.written)} written" if reconciled.written else "as it was"
        site = site.without(reconciled.deleted)
        deadline = time.monotonic() + wait_s
        while not (judged := readiness.judge(client.status(), site.pools(), site.replicas())).is_ready:
            show(board, judged)
            if time.monotonic() > deadline:
                raise YardError(ErrorCode.UNAVAILABLE, f"the site runs but does not serve all: {judged.missing}")
            time.sleep(_POLL_S)
        show(board, judged)
        return Up(
            found,
            ask_canary(client, site.default_route, board),
            was_running=True,
            kept=reconciled.kept,
            deleted=reconciled.deleted,
            notes=reconciled.notes,
        )


def refuse_other_ports(found: state.SiteState, site: SiteFiles) -> None:
    """YardError(INVALID) when the command line asks for other ports than the site runs with. Those of site.yaml do not ask: the
    site may have been started with others on the command line."""
    running = {name: getattr(found, name) for name in ("grpc_port", "http_port", "dashboard_port")}
    asked = {name: getattr(site.spec.listen, name) for name in running if name in site.given}
    if any(port and port != running[name] for name, port in asked.items()):
        raise invalid(
            f"site {found.site} runs with gRPC, HTTP and dashboard on ports {', '.join(map(str, running.values()))}; "
            "other ports need `yard down` first"
        )


def _answers(client: SiteClient) -> bool:
    try:
        client.status()
    except YardError as error:
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE):
            return False
        raise
    return True


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end."""
    came: list[int] = []
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTS]
    try:
        yield
    finally:
        for number, handler in zip(_INTERRUPTS, before, strict=True):
            signal.signal(number, handler)
        for number in came[:1]:
            os.kill(os.getpid(), number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a site behind."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS]
    try:
        yield
    finally:
        for number, handler in zip(_INTERRUPTS, before, strict=True):
            signal.signal(number, handler)


def _ports(site: SiteFiles) -> tuple[int, int, int]:
    listen = site.spec.listen
    return listen.grpc_port, listen.http_port, listen.dashboard_port
