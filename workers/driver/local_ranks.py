"""Ranks as child processes of this one: the same processes as in a cluster, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gateway.api.errors import unavailable
from workers.driver.launcher import RANK_MODULE, rank_command, rank_environment, starts_alone
from workers.driver.rank_link import listens
from workers.driver.scratch import clear_scratch, make_scratch
from workers.rank.config import RankConfig, endpoint_path, pid_path, socket_path

START_TIMEOUT_S = 180.0  # importing torch takes 2 s on an idle core, and a minute where 20 processes share it
STOP_TIMEOUT_S = 5.0


class LocalRanks:
    """`config.directory` holds the sockets; ranks end when the process `host_pid` (default: this one) does."""

    def __init__(self, config: RankConfig, ranks: int, *, module: str = RANK_MODULE, host_pid: int | None = None) -> None:
        self._config = replace(config, host_pids=(host_pid or os.getpid(),) * ranks, ranks=ranks)
        self._ranks = ranks
        self._module = module
        self._processes: list[asyncio.subprocess.Process] = []

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
        config = replace(self._config, rendezvous=f"file:{fresh_meeting_place(directory)}")
        alone = starts_alone(config.device)
        for rank in range(self._ranks if alone else 1):
            self._processes.append(await self._launch(replace(config, rank=rank)))
        await wait_listening(self.addresses, self._processes, directory / "ranks.log")
        return self.addresses

    async def stop(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in processes:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        end_leftovers(self._config.directory, range(self._ranks))

    async def _launch(self, config: RankConfig) -> asyncio.subprocess.Process:
        with (config.directory / "ranks.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *rank_command(config, self._module),
                env=start_environment(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


async def wait_listening(addresses: list[str], processes: list[asyncio.subprocess.Process], log: Path) -> None:
    """YardError with the end of the log when the ranks do not come up."""
    ends = [asyncio.create_task(process.wait()) for process in processes]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all([await listens(address) for address in addresses]):
                ended, _ = await asyncio.wait(ends, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                if ended:
                    code = ended.pop().result()
                    raise unavailable(f"the ranks ended with code {code} before they listened; {log} ends:\n{tail(log)}")
    except TimeoutError as error:
        raise unavailable(f"the ranks do not listen after {START_TIMEOUT_S:.0f} s; {log} ends:\n{tail(log)}") from error
    finally:
        for end in ends:
            end.cancel()


def start_environment(config: RankConfig) -> dict[str, str]:
    """Of `rank_command`. Ranks of one MPI world share a scratch directory, made anew."""
    environment = rank_environment(config, os.environ)
    return environment if starts_alone(config.device) else environment | make_scratch(config.directory, os.environ)


def fresh_meeting_place(directory: Path) -> Path:
    """A file that no earlier ranks of the pool have met at."""
    for old in directory.glob("meeting-*"):
        old.unlink(missing_ok=True)
    return directory / f"meeting-{secrets.token_hex(8)}"


def end_leftovers(directory: Path, ranks: Sequence[int]) -> None:
    """Kill rank processes of this pool that an earlier run left, and remove their sockets and shared memory."""
    for rank in ranks:
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
