"""The ranks of a pool as one thing: all are connected, or none is (rule 11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from gateway.api.errors import YardError, unavailable
from workers.driver import rank_link
from workers.driver.launcher import RankLauncher
from workers.driver.rank_link import RankLink
from workers.messages import Command, Exit, Inventory, Report, Welcome

ADOPT_TIMEOUT_S = 45.0  # for the step that a rank may be in
_INVENTORY_OP = 2**62  # above every op of the core

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class RankFleet:
    """Finds, starts, connects and drops ranks; says nothing of what they compute."""

    def __init__(self, launcher: RankLauncher, secret: str, driver: str) -> None:
        self._launcher = launcher
        self._secret = secret
        self._driver = driver
        self._links: dict[int, RankLink] = {}
        self._seen: dict[int, Welcome] = {}

    @property
    def welcomes(self) -> dict[int, Welcome]:
        """By rank; empty while the ranks are away."""
        return {rank: link.welcome for rank, link in self._links.items()}

    @property
    def seen(self) -> dict[int, Welcome]:
        """By rank, what each said of itself last; also while the ranks are away."""
        return self._seen | self.welcomes

    def send(self, rank: int, command: Command) -> None:
        self._links[rank].send(command)

    async def adopt(self) -> list[RankLink] | None:
        """The ranks of an earlier driver, if they live, agree on what they received, and still execute commands.

        YardError says why living ones cannot be adopted; they are to be started again then.
        """
        addresses = await self._launcher.find()
        if addresses is None:
            return None
        links = await self._connect(addresses)
        try:
            _check_agreement(links)
            await _check_alive(links)
        except YardError:
            _close(links)
            raise
        return links

    async def start(self) -> list[RankLink]:
        """New ranks, in place of what is left of earlier ones. YardError says what is missing."""
        return await self._connect(await self._launcher.start())

    def use(
        self, links: Sequence[RankLink], spawn: Spawn, on_report: Callable[[int, Report], None], on_lost: Callable[[str], None]
    ) -> None:
        """From now on these are the ranks. `on_lost` is called once, for the first that goes."""

        def lost(rank: int, reason: str) -> None:
            if self._links.get(rank) in links:
                on_lost(reason)

        self._links = {link.rank: link for link in links}
        self._seen |= self.welcomes
        for link in links:
            link.start(spawn, on_report, lost)

    def drop(self) -> None:
        """Leave the ranks alone: another driver may find them."""
        _close(list(self._links.values()))
        self._links = {}

    async def end(self) -> None:
        """The pool is deleted."""
        for link in self._links.values():
            link.send(Exit())
        await asyncio.sleep(0.05)
        self.drop()
        await self._launcher.stop()

    async def _connect(self, addresses: Sequence[str]) -> list[RankLink]:
        links: list[RankLink] = []
        try:
            for rank, address in enumerate(addresses):
                links.append(await rank_link.connect(rank, address, self._secret, self._driver))
        except YardError:
            _close(links)
            raise
        return links


def _close(links: Sequence[RankLink]) -> None:
    for link in links:
        link.close()


def _check_agreement(links: Sequence[RankLink]) -> None:
    """Members of one group that received different numbers of commands can never meet in a collective again."""
    counts: dict[int, set[int]] = {}
    for link in links:
        for shard in link.welcome.held:
            counts.setdefault(shard.group_id, set()).add(link.welcome.received.get(shard.group_id, 0))
    broken = sorted(group_id for group_id, seen in counts.items() if len(seen) > 1)
    if broken:
        raise unavailable(f"ranks disagree on the commands of groups {broken}: their driver died between two sends")


async def _check_alive(links: Sequence[RankLink]) -> None:
    """And take what they hold after all that was under way, which the welcome may have missed."""
    try:
        async with asyncio.timeout(ADOPT_TIMEOUT_S):
            for link in links:
                link.send(Inventory(op=_INVENTORY_OP))
            for link in links:
                done = await link.expect_done(_INVENTORY_OP)
                link.welcome = msgspec.structs.replace(link.welcome, held=done.inventory)
    except TimeoutError as error:
        raise unavailable(f"a rank does not execute commands, for {ADOPT_TIMEOUT_S:.0f} s now") from error
