"""Whether the site's own Ray can go on: its head process answers for it, and Ray ends everything a while after that is gone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import grpc

from gateway.api.errors import ErrorCode, YardError
from gateway.site import preflight, state
from gateway.site.home import Home
from gateway.site.processes import KEPT, server_names

_HEAD, _NODE = "gcs_server", "raylet"
_ASK_S = 2.0
LOOK_S = 2.0
"""How often a command that is Ray's client looks. Ray ends its clients from inside a minute after the head process is gone."""


def trouble(found: state.SiteState) -> str:
    """What is wrong and what to do; empty when nothing is. YardError(UNAVAILABLE) when a Ray that is not ours does not answer."""
    if not found.ray_is_ours:
        preflight.check_ray(found.ray_address)
        return ""
    leader = found.sessions.get("ray")
    if found.phase == "starting" or leader is None:
        return ""
    return judge(server_names(leader) if found.boot_id == state.boot_id() else ())


def judge(running: Collection[str]) -> str:
    """`running`: see `server_names`. Pure."""
    if _NODE not in running:
        return f"Ray's node process ({_NODE}) is gone, and with it all that ran there; `yard up` starts the site anew"
    if _HEAD in running:
        return ""
    if KEPT + _HEAD in running:
        return f"Ray's head process ({_HEAD}) was killed and is being started again; what serves goes on"
    return (
        f"Ray's head process ({_HEAD}) is gone and nothing starts it again: what serves goes on for a minute, then Ray ends it; "
        "`yard up` ends what is left and starts the site anew"
    )


def silence(address: str, deadline_s: float = _ASK_S) -> str:
    """What is wrong with a head process that runs and does not answer; empty when it does, if only to refuse the call."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=deadline_s)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() not in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            ):
                return ""
            return (
                f"Ray's head process ({_HEAD}) runs and does not answer at {address} within {deadline_s:g} s; "
                f"if it was stopped, continue it (`kill -CONT`, pid: `pgrep {_HEAD}`), else `yard down` and then `yard up`"
            )
    return ""


def refuse_ended(home: Home, found: state.SiteState, during: str, advice: str = "") -> None:
    """YardError when a process of the site's own Ray ended and will not come back: nothing that needs Ray can go on."""
    leader = found.sessions.get("ray")
    if not found.ray_is_ours or leader is None or not found.ray_address:
        return
    if gone := ended(server_names(leader)):
        what = "head" if gone == _HEAD else "node"
        raise YardError(
            ErrorCode.INTERNAL, f"Ray's {what} process ({gone}) ended during the {during} (log: {_log(home, gone)}){advice}"
        )


def ended(running: Collection[str]) -> str:
    """The server that is gone for good, empty when none is. `running`: see `server_names`. Pure."""
    if _NODE not in running:
        return _NODE
    return "" if _HEAD in running or KEPT + _HEAD in running else _HEAD


def _log(home: Home, server: str) -> Path:
    return home.run_dir / "ray" / "session_latest" / "logs" / f"{server}.out"
