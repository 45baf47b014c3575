"""One TensorRT-LLM worker group: its server process from start to end, and its memory until it is measured to be free.

Operations are serial. A server that goes by itself is reported once; what is left of it is ended with the unload that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gateway.api.config import ModelSpec
from gateway.api.errors import YardError, unavailable
from workers.driver import engine_link
from workers.driver.engine_launch import boot_command, server_command
from workers.driver.engine_link import EngineLink
from workers.driver.engine_processes import CONFIG
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import EngineSeat, Place
from workers.engines.trtllm.messages import Cancel, Generate, Load, Output, Park, Shutdown, Tokens, Wake
from workers.engines.trtllm.messages import Done as EngineDone
from workers.engines.trtllm.messages import Progress as EngineProgress
from workers.messages import Done, HeldShard, LoadShard, Progress

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
MOVE_TIMEOUT_S = 300.0
SHUTDOWN_TIMEOUT_S = 90.0  # the library waits up to 60 s for its ranks
FREE_TIMEOUT_S = 60.0  # of one measurement; repeated until the memory is free
UNMEASURED_PAUSE_S = 2.0
LAST_WORDS = 200  # characters of a log, in a reason


class Reports(Protocol):
    """Where a host tells of its group; all on the driver's loop."""

    def done(self, rank: int, done: Done) -> None: ...

    def progress(self, rank: int, progress: Progress) -> None: ...

    def tokens(self, group_id: int, outputs: list[Output]) -> None: ...

    def lost(self, group_id: int, reason: str) -> None: ...

    def event(self, kind: str, subject: str, message: str) -> None: ...


class Plan(msgspec.Struct, frozen=True):
    """What a driver that is started again must know of a running server. Kept by the server, which does not look into it."""

    commands: tuple[tuple[int, LoadShard], ...]  # by rank, in the order of the group's ranks
    digest: str
    precision: str
    context: int
    park: str
    started_unix: float


@dataclass
class _Memory:
    held: list[int] = field(default_factory=list)  # by device of the server's node
    pids: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)  # of each device, by anybody, when that was measured


class EngineHost:
    def __init__(
        self,
        runtime: EngineRuntime,
        seat: EngineSeat,
        group_id: int,
        reports: Reports,
        secret: str,
        driver: str,
        grace_s: float,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._runtime = runtime
        self._seat = seat
        self._id = group_id
        self._reports = reports
        self._config = {"secret": secret, "grace_s": grace_s}
        self._secret = secret
        self._driver = driver
        self._spawn = spawn
        self._name = server_name(group_id)
        self._link: EngineLink | None = None
        self._place: Place | None = None
        self._plan: Plan | None = None
        self._memory = _Memory()
        self._parked = False
        self._resident: dict[int, dict[str, int]] = {}  # by index of its ranks: lines of the ledger while it serves
        self._ending = False
        self._last: asyncio.Task[None] | None = None
        self._load_op: dict[int, int] = {}

    @property
    def model(self) -> str:
        return self._plan.commands[0][1].model if self._plan else ""

    # ------------------------------------------------------------------ from the loop; none waits

    def load(self, commands: Mapping[int, LoadShard]) -> None:
        self._load_op = {rank: command.op for rank, command in commands.items()}
        self._serially(self._operate(self._load_op, lambda: self._load(commands)))

    def park(self, ops: Mapping[int, int]) -> None:
        self._serially(self._operate(ops, self._park))

    def wake(self, ops: Mapping[int, int]) -> None:
        self._serially(self._operate(ops, self._wake))

    def unload(self, ops: Mapping[int, int]) -> None:
        self._ending = True
        self._serially(self._operate(ops, self._unload))

    def send(self, message: Generate | Cancel) -> None:
        """To a server that is gone: its loss ends the requests."""
        if self._link is not None:
            self._link.send(message)

    def drop(self) -> None:
        """It makes no progress: its connection is closed here, which is its loss."""
        if self._link is not None:
            self._link.close()

    async def adopt(self) -> Mapping[int, HeldShard]:
        """What a server of an earlier driver holds, by rank; YardError when it cannot be taken over."""
        link = await engine_link.connect(await self._seat.address(self._name), self._secret, self._driver)
        welcome = link.welcome
        if welcome.state not in ("ready", "parked") or not welcome.held:
            link.close()
            raise unavailable(f"its model is {welcome.state}")
        self._plan = msgspec.json.decode(welcome.held.encode(), type=Plan)
        self._place = await self._seat.place([rank for rank, _ in self._plan.commands])
        self._parked = welcome.state == "parked"
        self._memory = _Memory(welcome.device_bytes, welcome.pids, await self._used())
        self._follow(link)
        return {rank: self._held(index) for index, (rank, _) in enumerate(self._plan.commands)}

    def leave(self) -> None:
        """Another driver may find the server."""
        self._ending = True
        if self._link is not None:
            self._link.close()

    # ------------------------------------------------------------------ operations

    async def _load(self, commands: Mapping[int, LoadShard]) -> None:
        ranks = next(iter(commands.values())).ranks
        first = commands[ranks[0]]
        spec = ModelSpec.model_validate_json(first.spec_json)
        settings = self._runtime.settings
        self._say(0.0, "asking TensorRT-LLM what it can do")
        self._place = place = await self._seat.place(ranks)
        made, checkpoint = await self._runtime.arguments_for(first, spec, place)
        for note in made.notes:
            log.info("model %s: %s", first.model, note)
        self._plan = Plan(
            commands=tuple((rank, commands[rank]) for rank in ranks),
            digest=checkpoint.digest,
            precision=checkpoint.precision,
            context=made.kwargs["max_seq_len"],
            park=made.park,
            started_unix=time.time(),
        )
        self._say(0.0, "starting its server")
        command = server_command(settings, Path(CONFIG), place.nodes)
        await self._seat.start(self._name, command, self._runtime.environment(place), self._config)
        link = await self._connect()
        self._follow(link)
        orchestrator = "ray" if settings.orchestrator == "ray" else settings.launch
        held = msgspec.json.encode(self._plan).decode()

        def load(op: int) -> Load:
            return Load(
                op=op,
                kwargs=made.kwargs,
                entry=made.entry,
                park=made.park,
                orchestrator=orchestrator,
                world=len(ranks),
                devices=list(place.devices),
                placement_group=place.placement_group,
                bundles=list(place.bundles),
                held=held,
            )

        try:
            done = await link.ask(load, settings.start_timeout_s)
        except YardError as error:
            raise unavailable(f"{error.message}; its log ends:\n{await self._seat.log_tail(self._name)}") from error
        for note in done.notes:
            self._reports.event("trtllm", first.model, note)
        self._parked = False
        await self._remember(done)

    async def _park(self) -> None:
        self._memory_after(await self._ask(Park, MOVE_TIMEOUT_S))
        self._parked = True

    async def _wake(self) -> None:
        done = await self._ask(Wake, MOVE_TIMEOUT_S)
        self._parked = False
        await self._remember(done)

    async def _unload(self) -> None:
        """Returns when the memory is free: until then the ledger keeps it (rule 3)."""
        if self._place is None:
            return  # it did not even begin
        used = self._memory.used
        with contextlib.suppress(YardError):
            used = await self._used() if await self._seat.exit_code(self._name) is None else used
        if self._link is not None and not self._link.is_lost:
            self._link.send(Shutdown())
            if not await self._seat.wait(self._name, SHUTDOWN_TIMEOUT_S):
                self._reports.event("trtllm", self.model, f"its server does not end in {SHUTDOWN_TIMEOUT_S:.0f} s: killing it")
            self._link.close()
        since = self._plan.started_unix if self._plan else 0.0
        await self._seat.end(self._name, self._memory.pids, since)
        await self._wait_free(used or self._memory.used)
        self._memory = _Memory()

    async def _wait_free(self, used: list[int]) -> None:
        memory, place = self._memory, self._place
        assert place is not None
        if not memory.held or not used:
            await asyncio.sleep(UNMEASURED_PAUSE_S)  # NVML is not there, as an event said, or nothing was held yet
            return
        lists = [json.dumps(values) for values in (list(place.devices), memory.pids, memory.held, used)]
        while True:
            seen = await self._gpu_memory(*lists, str(FREE_TIMEOUT_S))
            if seen["free"]:
                return
            text = (
                f"{FREE_TIMEOUT_S:.0f} s after the end of group {self._id} its processes still hold memory (bytes by pid: "
                f"{seen['by_pid']}), freed so far: {seen['freed']}; its place is kept until it is free"
            )
            self._reports.event("memory_not_free", self.model, text)

    # ------------------------------------------------------------------ inside

    def _serially(self, work: Coroutine[Any, Any, None]) -> None:
        previous = self._last

        async def after() -> None:
            if previous is not None:
                await asyncio.wait([previous])
            await work

        self._last = self._spawn(after(), f"engine-{self._id}")

    async def _operate(self, ops: Mapping[int, int], work: Callable[[], Awaitable[None]]) -> None:
        """Report the end for every rank. Anything that starting a foreign library can raise is its group's failure."""
        error = ""
        try:
            await work()
        except YardError as problem:
            error = problem.message
        except Exception as problem:
            log.exception("group %d", self._id)
            error = f"{type(problem).__name__}: {problem}"
        for index, (rank, op) in enumerate(ops.items()):
            held = self._held(index) if self._plan is not None and not error else None
            self._reports.done(rank, Done(op=op, error=error, held=held))

    async def _connect(self) -> EngineLink:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            with contextlib.suppress(YardError):
                return await engine_link.connect(await self._seat.address(self._name), self._secret, self._driver)
            code = await self._seat.exit_code(self._name)
            if code is not None or time.monotonic() > deadline:
                why = f"ended with code {code}" if code is not None else f"does not listen after {CONNECT_TIMEOUT_S:.0f} s"
                raise unavailable(f"its server {why}; its log ends:\n{await self._seat.log_tail(self._name)}")
            await asyncio.sleep(0.05)

    def _follow(self, link: EngineLink) -> None:
        self._link = link

        async def follow() -> None:
            reason = await link.read(self._on_message)
            if not self._ending and self._link is link:
                with contextlib.suppress(YardError):
                    last = (await self._seat.log_tail(self._name)).strip().splitlines()[-1:]
                    reason = f"{reason}; its log ends: {last[0][-LAST_WORDS:]}" if last else reason
                self._reports.lost(self._id, reason)

        self._spawn(follow(), f"engine-link-{self._id}")

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Tokens):
            self._reports.tokens(self._id, message.outputs)
        elif isinstance(message, EngineProgress):
            self._say(message.fraction, message.what)

    def _say(self, fraction: float, what: str) -> None:
        for rank, op in self._load_op.items():
            self._reports.progress(rank, Progress(op, fraction, what))

    async def _ask(self, make: Callable[[int], Any], timeout_s: float) -> EngineDone:
        if self._link is None:
            raise unavailable("it has no server")
        return await self._link.ask(make, timeout_s)

    def _memory_after(self, done: EngineDone) -> None:
        self._memory.held = done.device_bytes
        self._memory.pids = sorted({*self._memory.pids, *done.pids})

    async def _remember(self, done: EngineDone) -> None:
        self._memory_after(done)
        self._memory.used = await self._used()

    async def _used(self) -> list[int]:
        """Of each device; empty where it cannot be measured."""
        assert self._place is not None
        try:
            return (await self._gpu_memory(json.dumps(list(self._place.devices))))["used"]
        except (YardError, ValueError, KeyError):
            return []

    async def _gpu_memory(self, *arguments: str) -> dict[str, Any]:
        assert self._place is not None
        command = boot_command(self._runtime.settings, "gpu_memory", *arguments)
        return json.loads(await self._seat.run(command, self._runtime.environment(self._place), 2 * FREE_TIMEOUT_S))

    def _held(self, index: int) -> HeldShard:
        """Of one rank: what NVML measured on its device, its KV told apart. On other nodes: as on this one's first."""
        assert self._plan is not None
        _, command = self._plan.commands[index]
        kv = command.budget["kv_floor"]
        measured = self._memory.held[index if index < len(self._memory.held) else 0] if self._memory.held else 0
        runs = not self._parked
        lines = {"kv": kv, **{kind: size for kind, size in command.budget.items() if kind != "kv_floor"}}
        if measured:
            rest = max(0, measured - (kv if runs else 0))
            weights = min(rest, command.budget["weights"]) if runs else 0
            lines = {"weights": weights, "kv": kv if runs else 0, "context": rest - weights}
        elif not runs:
            lines = {}
        if runs:
            self._resident[index] = lines
        resident = self._resident.get(index, command.budget)
        return HeldShard(
            group_id=self._id,
            model=command.model,
            spec_json=command.spec_json,
            ranks=command.ranks,
            tensor_parallel=command.tensor_parallel,
            pipeline_parallel=command.pipeline_parallel,
            kv_blocks=command.kv_floor_blocks if runs else 0,
            kv_ceiling_blocks=command.kv_ceiling_blocks,
            kv_block_tokens=command.kv_block_tokens,
            bytes=lines,
            digest=self._plan.digest,
            precision=self._plan.precision,
            context=self._plan.context,
            parkable=True,
            park_unloads=self._plan.park == "reload",
            parked=self._parked,
            standby_bytes=0 if runs else resident["weights"],
            wake_bytes={} if runs else {kind: size for kind, size in resident.items() if not kind.startswith("kv")},
        )


def server_name(group_id: int) -> str:
    return f"e{group_id}"
