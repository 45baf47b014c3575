"""What is wrong with this home's site that its gateways do not see: begun and not ended, or gone and not started again."""

from __future__ import annotations

from gateway.api.errors import YardError
from gateway.site import ray_health, state
from gateway.site.processes import KEPT, is_alive, server_names

_VALKEY = "valkey-server"


def troubles(found: state.SiteState) -> list[str]:
    """Each with what to do behind its `; `."""
    if ended := ended_start(found):
        return [ended]
    try:
        ray = ray_health.trouble(found)
    except YardError as error:
        ray = error.message
    return [problem for problem in (ray, valkey_trouble(found)) if problem]


def ended_start(found: state.SiteState) -> str:
    """Said when the `yard up` that was starting the site is gone; else empty."""
    if found.phase != "starting" or (found.boot_id == state.boot_id() and is_alive(found.owner)):
        return ""
    return f"a `yard up` (pid {found.owner.pid}) ended midway; `yard up` starts anew, `yard down` ends what is left"


def begun_down(found: state.SiteState) -> str:
    """Said from the first moment of a `yard down` until its end, since a site may serve for a while after one was cut short."""
    if found.phase != "stopping":
        return ""
    return "a `yard down` was begun and has not ended; `yard down` goes on with it, `yard up` starts the site anew"


def valkey_trouble(found: state.SiteState) -> str:
    """Said when the embedded Valkey is gone and its keeper, too."""
    leader = found.sessions.get("valkey")
    if found.phase == "starting" or leader is None:
        return ""
    running = server_names(leader) if found.boot_id == state.boot_id() else ()
    if _VALKEY in running or KEPT + _VALKEY in running:
        return ""
    return f"the embedded Valkey ({_VALKEY}) is gone and nothing starts it again; `yard up` starts the site anew"
