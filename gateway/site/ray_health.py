"""Whether the site's own Ray can go on: its head process answers for it, and Ray ends everything a while after that is gone."""

from __future__ import annotations

from collections.abc import Collection

import grpc

from gateway.site import preflight, state
from gateway.site.processes import KEPT, server_names

_HEAD, _NODE = "gcs_server", "raylet"
_ASK_S = 2.0


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
