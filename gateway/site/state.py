"""The state file: what `yard up` started, so that `yard down` and the next `yard up` know it, also after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from gateway.api.errors import ErrorCode, YardError
from gateway.site.client_tls import ClientTls
from gateway.site.home import Home, write_private
from gateway.site.processes import Mark


class SiteState(msgspec.Struct, frozen=True, kw_only=True):
    """Written before each process is started and after each step; removed by `yard down`."""

    site: str
    site_dir: str
    phase: Literal["starting", "running", "stopping"]
    boot_id: str
    owner: Mark  # the `yard up` that writes it
    sessions: dict[str, Mark] = {}  # "valkey", "ray" -> leader of the session that holds all its processes
    ray_address: str = ""
    ray_is_ours: bool = True
    redis_is_ours: bool = True
    bind_host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int = 0
    dashboard_port: int = 0
    valkey_port: int = 0
    tls: ClientTls | None = None  # how `yard` reaches the gateways
    redis_url: str = ""  # empty when ours: made from the secrets. The file is readable by its owner only.

    def with_session(self, name: str, leader: Mark) -> SiteState:
        return msgspec.structs.replace(self, sessions={**self.sessions, name: leader})

    @property
    def grpc_address(self) -> str:
        return f"{self.client_host}:{self.grpc_port}"

    @property
    def http_address(self) -> str:
        return f"{self.client_host}:{self.http_port}"

    @property
    def client_host(self) -> str:
        """Where a client on this machine reaches the gateways."""
        return "127.0.0.1" if self.bind_host in ("0.0.0.0", "::", "") else self.bind_host


def load(home: Home) -> SiteState | None:
    """None when nothing was started here. YardError when the file cannot be understood."""
    try:
        return msgspec.json.decode(home.state_file.read_bytes(), type=SiteState)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise YardError(
            ErrorCode.INTERNAL, f"{home.state_file} cannot be read ({error}); stop the site's processes by hand, then remove it"
        ) from error


def save(home: Home, state: SiteState) -> SiteState:
    write_private(home.state_file, msgspec.json.encode(state))
    return state


def remove(home: Home) -> None:
    home.state_file.unlink(missing_ok=True)


def boot_id() -> str:
    """Changes with every boot, so that recorded process ids are not believed after one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
