"""`yard down`: lets requests finish, stops everything that the state file names, and leaves desired state for the next start."""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from gateway.api.errors import ErrorCode, YardError
from gateway.site import draining, state
from gateway.site.board import Board
from gateway.site.home import Home
from gateway.site.processes import KEPT, is_alive, server_names, stop

log = logging.getLogger(__name__)

_ESSENTIAL = {"ray": {"gcs_server", "raylet"}, "valkey": {"valkey-server"}}
# The raylet signs off at the head and ends its workers; without a living head it waits for it in vain.
_RAYLET_GRACE_S = 6.0
_TERM_GRACE_S = 3.0


def down(home: Home, board: Board) -> state.SiteState | None:
    """None when nothing was running. Works on a site that crashed, too. YardError when a process cannot be ended."""
    found = state.load(home)
    if found is None:
        return None
    if found.phase == "starting" and found.boot_id == state.boot_id() and is_alive(found.owner):
        raise YardError(
            ErrorCode.CONFLICT, f"`yard up` (pid {found.owner.pid}) is still starting this site; stop it with Ctrl-C first"
        )
    if is_complete(found, ("ray",)):  # draining needs Ray only
        # Whoever ends this command midway leaves a site without gateways: the next `yard up` starts it anew.
        found = state.save(home, msgspec.structs.replace(found, phase="stopping"))
        with board.step("applications", "draining") as step:
            if problem := draining.drain(home):
                step.note = "not drained"
                board.say(_not_drained(found, problem))
    with board.step("processes", "stopping Ray and Valkey" if found.ray_is_ours else "stopping Valkey"):
        stop_processes(home, found)
    return found


def is_complete(found: state.SiteState, servers: Collection[str] = tuple(_ESSENTIAL)) -> bool:
    """Whether these of the servers that the site started still run, or are just being started again."""
    if found.boot_id != state.boot_id() or not found.ray_address:
        return False
    for name, leader in found.sessions.items():
        running = server_names(leader) if name in servers else set()
        if name in servers and not all(server in running or KEPT + server in running for server in _ESSENTIAL[name]):
            return False
    return True


def stop_processes(home: Home, found: state.SiteState) -> None:
    """Ends Ray, then Valkey (so that its append-only file is whole), and removes the state file once nothing is left."""
    if found.boot_id == state.boot_id():
        leaders = found.sessions
        left = (
            stop([leaders["ray"]], None, _TERM_GRACE_S, first="raylet", first_grace_s=_RAYLET_GRACE_S) if "ray" in leaders else []
        )
        if "valkey" in leaders:
            _shut_valkey_down(home, found)
        left += stop(list(leaders.values()), home.run_dir, _TERM_GRACE_S)
        if left:
            names = ", ".join(f"{process.pid}" for process in left)
            raise YardError(ErrorCode.INTERNAL, f"processes {names} do not end, not even by SIGKILL; {home.state_file} is kept")
    home.clear_run_dirs()
    state.remove(home)


def _not_drained(found: state.SiteState, problem: str) -> str:
    text = f"warning: the applications could not be drained ({problem}); "
    if found.ray_is_ours:
        return text + "their processes are ended with what they were doing"
    return (
        text
        + f"they may still run on the Ray at {found.ray_address}: see `serve status` there, and end them with `serve shutdown`"
    )


def _shut_valkey_down(home: Home, found: state.SiteState) -> None:
    """Without this it gets SIGTERM like all others, upon which it writes its file, too."""
    try:
        from gateway.site import valkey

        valkey.shut_down(found.valkey_port, home.secrets().valkey)
    except Exception as error:  # noqa: BLE001 - whatever is broken, its process has to end
        log.warning("Valkey is ended by a signal, it cannot be asked to: %s", error)
