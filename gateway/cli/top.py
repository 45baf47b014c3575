"""top: the site as it is this second, again and again."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import printing
from gateway.cli.options import ServerOption, connect

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gateway.api.records import PoolRecord, RankRecord, SiteStatus

_BAR = 40
_KINDS = (("weights", "█"), ("kv_floor", "▓"), ("kv_used", "▒"))


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, and end; also where there is no terminal.")] = False,
    server: ServerOption = None,
) -> None:
    """Memory, models and speed, live. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with connect(server) as client:
        before = client.status()
        if once or not sys.stdout.isatty():
            console.print(view(before, before, 0.0))
            return
        looked = time.monotonic()
        with Live(view(before, before, 0.0), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                status, now = client.status(), time.monotonic()
                live.update(view(status, before, now - looked), refresh=True)
                before, looked = status, now


def view(status: SiteStatus, before: SiteStatus, elapsed_s: float) -> RenderableType:
    """`before` was read `elapsed_s` earlier: what counts up becomes a speed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from gateway.state.servers import server_groups

    redis = "" if status.redis == "ok" else "  REDIS AWAY"
    in_flight = sum(gateway.requests_in_flight for gateway in status.gateways)
    head = Text(f"{status.site}  revision {status.revision}  {len(status.gateways)} gateways  {in_flight} in flight{redis}")
    legend = "  ".join(f"{sign} {kind}" for kind, sign in (*_KINDS, ("other", "░")))
    memory = Table("pool", "rank", f"memory  {legend}", "free", "busy", box=None)
    models = Table("model", "pool", "state", "running", "waiting", "tokens/s", "KV in use", box=None)
    switches = Table("pool", "switch", "times", "last", "of the link", box=None)
    old = {pool.pool: pool for pool in before.pools}
    for pool in status.pools:
        for rank in pool.ranks:
            free = rank.capacity_bytes - sum(size for *_, size in rank.ledger)
            busy = f"{rank.utilization:.0%}" if rank.utilization >= 0 else "-"
            doing = busy if rank.alive else rank.word
            memory.add_row(pool.pool, str(rank.index), bar(rank), printing.size(max(free, 0)), doing)
        for model in sorted({group.model for group in pool.groups}):
            mine = [group for group in pool.groups if group.model == model]
            mapped, used = sum(group.kv_bytes for group in mine), sum(group.kv_used_bytes for group in mine)
            models.add_row(
                model,
                pool.pool,
                ", ".join(sorted({group.residency or group.state for group in mine})),
                str(sum(group.running for group in mine)),
                str(sum(group.waiting for group in mine)),
                f"{speed(pool, old.get(pool.pool), model, elapsed_s):.1f}",
                f"{used / mapped:.0%} of {printing.size(mapped)}" if mapped else "-",
            )
        for switch in pool.switches:
            share = f"{switch.link_share:.0%}" if switch.link_share else ""
            switches.add_row(pool.pool, switch.path, str(switch.count), f"{switch.last_s * 1000:.0f} ms", share)
    for _, server in sorted(server_groups(status.gateways).items()):
        models.add_row(server.model, "elsewhere", server.state, str(server.running), "-", "-", "-")
    return Group(head, Text(), memory, Text(), models, Text(), switches)


def bar(rank: RankRecord) -> str:
    """What lies in a rank's memory, in `_BAR` characters."""
    sizes = dict.fromkeys([kind for kind, _ in _KINDS], 0)
    other = 0
    for _, kind, size in rank.ledger:
        if kind in sizes:
            sizes[kind] += size
        else:
            other += size
    capacity = max(rank.capacity_bytes, 1)
    parts = "".join(sign * round(_BAR * sizes[kind] / capacity) for kind, sign in _KINDS) + "░" * round(_BAR * other / capacity)
    return parts[:_BAR].ljust(_BAR, "·")


def speed(pool: PoolRecord, before: PoolRecord | None, model: str, elapsed_s: float) -> float:
    """Tokens a second of answers that ended since then. 0 when its driver is another one now."""
    if before is None or before.incarnation != pool.incarnation or elapsed_s <= 0:
        return 0.0
    then = {total.model: total.completion_tokens for total in before.totals}
    now = {total.model: total.completion_tokens for total in pool.totals}
    return max(now.get(model, 0) - then.get(model, 0), 0) / elapsed_s
