"""Ranks as child processes of this one: the same processes as in a cluster, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

from gateway.api.errors import unavailable
from workers.driver.launcher import RANK_MODULE, rank_command, rank_environment
from workers.driver.rank_link import listens
from workers.driver.scratch import clear_scratch, make_scratch
from workers.rank.config import RankConfig, endpoint_path, pid_path, socket_path

START_TIMEOUT_S = 180.0  # importing torch takes 2 s on an idle core, and a minute where 20 processes share it
STOP_TIMEOUT_S = 5.0


class LocalRanks:
    """`config.directory` holds the sockets; ranks end when the process `host_pid` (default: this one) does."""

    def __init__(self, config: RankConfig, ranks: int, *, module: str = RANK_MODULE, host_pid: int | None = None) -> None:
        self._config = replace(config, host_pids=(host_pid or os.getpid(),) * ranks)
        self._ranks = ranks
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    @property
    def addresses(self) -> list[str]:
        return [f"unix:{socket_path(self._config.directory, rank)}" for rank in range(self._ranks)]

    async def find(self) -> list[str] | None:
        for address in self.addresses:
            if not await listens(address):
                return None
        return self.addresses

    async def start(self) -> list[str]:
        await self.stop()
        directory = self._config.directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (directory / "ranks.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *rank_command(self._config, self._ranks, self._module),
                env=rank_environment(self._config, self._ranks, os.environ) | make_scratch(directory, os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        await wait_listening(self.addresses, self._process, directory / "ranks.log")
        return self.addresses

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        self._process = None
        end_leftovers(self._config.directory, self._ranks)


async def wait_listening(addresses: list[str], process: asyncio.subprocess.Process, log: Path) -> None:
    """YardError with the end of the log when the ranks do not come up."""
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all([await listens(address) for address in addresses]):
                await asyncio.wait([ended], timeout=0.05)
                if ended.done():
                    raise unavailable(
                        f"the ranks ended with code {ended.result()} before they listened; {log} ends:\n{tail(log)}"
                    )
    except TimeoutError as error:
        raise unavailable(f"the ranks do not listen after {START_TIMEOUT_S:.0f} s; {log} ends:\n{tail(log)}") from error
    finally:
        ended.cancel()


def end_leftovers(directory: Path, ranks: int) -> None:
    """Kill rank processes of this pool that an earlier run left, and remove their sockets and shared memory."""
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            pid = int(pid_path(directory, rank).read_text())
            if b"--directory\0" + str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        for left in (pid_path(directory, rank), socket_path(directory, rank), endpoint_path(directory, rank)):
            left.unlink(missing_ok=True)
    clear_scratch(directory, os.environ)


def tail(log: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""
