"""`yard down`: lets requests finish, stops everything that the state file names, and leaves desired state for the next start."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from gateway.api.errors import ErrorCode, YardError
from gateway.site import ray_head, state, valkey
from gateway.site.board import Board
from gateway.site.home import Home
from gateway.site.processes import is_alive, members, process_name, stop

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
        with board.step("applications", "draining"):
            _undeploy(home, found)
    with board.step("processes", "stopping Ray and Valkey" if found.ray_is_ours else "stopping Valkey"):
        stop_processes(home, found)
    return found


def is_complete(found: state.SiteState, servers: Collection[str] = tuple(_ESSENTIAL)) -> bool:
    """Whether these of the servers that the site started still run."""
    if found.boot_id != state.boot_id() or not found.ray_address:
        return False
    for name, leader in found.sessions.items():
        running = {process_name(process) for process in members([leader])}
        if name in servers and not _ESSENTIAL[name] <= running:
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
            valkey.shut_down(found.valkey_port, home.secrets().valkey)
        left += stop(list(leaders.values()), home.run_dir, _TERM_GRACE_S)
        if left:
            names = ", ".join(f"{process.pid}" for process in left)
            raise YardError(ErrorCode.INTERNAL, f"processes {names} do not end, not even by SIGKILL; {home.state_file} is kept")
    home.clear_run_dirs()
    state.remove(home)


def _undeploy(home: Home, found: state.SiteState) -> None:
    from gateway.site import deployment

    loopback = found.ray_address.startswith("127.0.0.1:")
    deployment.load(ray_head.environment(home, loopback=loopback) if found.ray_is_ours else {})
    try:
        deployment.connect(found.ray_address)
    except YardError:
        if not found.ray_is_ours:
            raise
        return  # a head that does not answer has nothing to drain; its processes are ended next
    deployment.undeploy(whole_serve=found.ray_is_ours)
    deployment.disconnect()
