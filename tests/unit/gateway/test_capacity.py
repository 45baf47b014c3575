"""The page `/capacity`: its JSON from what the site says, and the page itself in a browser."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest
from lone_gateway import LoneGateway
from scripted_pool import ScriptedPool

from gateway.api.records import ControllerRecord, RankRecord, SwitchRecord
from gateway.state.snapshot import Observed

MIB = 2**20
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ODD = '<img src=x onerror="document.title=1">'


def filled(lone: LoneGateway, pool: ScriptedPool) -> LoneGateway:
    """A pool with one rank in use, a model that fails with a reason, and one that is nowhere."""
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "aliases": ["talk"]})
    ledger = (("m", "weights", 60 * MIB), ("m", "kv_floor", 15 * MIB))
    rank = RankRecord(index=0, node="here", pid=1, device="cpu", capacity_bytes=100 * MIB, ledger=ledger, utilization=0.37)
    wake = SwitchRecord("wake", 3, 0.25, 0.2, 0.4, bytes=12 * MIB, link_share=0.91)
    record = pool.record(extra={"ranks": (rank,), "switches": (wake,)})
    broken = msgspec.structs.replace(record.groups[0], model="broken", state="failed", reason=ODD)
    record = msgspec.structs.replace(record, groups=(*record.groups, broken))
    controller = ControllerRecord("c", 1, 1, 0.0, unplaced={"large": ("pool a: 2 GiB asked, 25 MiB free",)})
    lone.view.apply_observed(Observed({"a": record}, {}, controller))
    return lone


async def test_the_json_says_what_lies_where_and_what_waits(lone: LoneGateway, pool: ScriptedPool) -> None:
    filled(lone, pool)
    async with httpx.AsyncClient() as client:
        seen = (await client.get(f"{lone.http}/capacity.json")).json()
    [found] = seen["pools"]
    [rank] = found["ranks"]
    assert (rank["free_bytes"], rank["utilization"], len(rank["ledger"])) == (25 * MIB, 0.37, 2)
    assert found["switches"][0]["link_share"] == 0.91
    [route] = seen["routes"]
    assert (route["name"], route["aliases"]) == ("chat", ["talk"])
    assert route["targets"] == [{"model": "m", "weight": 100, "ready_groups": 1}]
    waiting = {item["what"]: item["why"] for item in seen["waiting"]}
    assert waiting == {"model broken": ODD, "model large": "pool a: 2 GiB asked, 25 MiB free"}


async def test_keys_that_only_ask_models_do_not_see_it(lone: LoneGateway) -> None:
    """Rule 15: a key that is shown counts, also on loopback."""
    for name, role in (("app", "infer"), ("duty", "operate")):
        lone.put("Tenant", name, {"key_hashes": [hashlib.sha256(name.encode()).hexdigest()], "role": role})
    async with httpx.AsyncClient() as client:
        statuses = {
            key: (await client.get(f"{lone.http}/capacity.json", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("app", "duty", "unknown")
        }
        page = await client.get(f"{lone.http}/capacity")
    assert statuses == {"app": 403, "duty": 200, "unknown": 401}
    assert page.status_code == 200
    assert "script-src" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", ""), "the page asks nobody else for anything"


@pytest.mark.skipif(CHROMIUM is None, reason="shows the page in Chromium")
async def test_the_page_in_a_browser(lone: LoneGateway, pool: ScriptedPool, tmp_path: Path) -> None:
    """Every rank is a bar of what lies in it, and text from the site stays text."""
    filled(lone, pool)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=2500", f"{lone.http}/capacity"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(60):
        page = (await process.communicate())[0].decode()
    assert '<span class="weights" style="width:60%' in page
    assert "37 % busy" in page
    assert "25.0 MiB free of 100 MiB" in page
    assert "2 GiB asked, 25 MiB free" in page
    assert "91 %" in page
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert "<title>lone: capacity</title>" in page
