"""Where the site of this home listened the last time: `yard up` keeps to it, unless an option or site.yaml says otherwise."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.site.home import Home, write_private
from gateway.site.site_files import SiteFiles
from gateway.site.state import SiteState

_OPTIONS = {"host": "--host", "grpc_port": "--grpc-port", "http_port": "--http-port", "dashboard_port": "--dashboard-port"}


class _Last(msgspec.Struct, frozen=True):
    site: str
    site_dir: str
    written: dict[str, str | int]  # in site.yaml then
    used: dict[str, str | int]


def remember(home: Home, files: SiteFiles, started: SiteState) -> None:
    """After a start that went well."""
    used = {
        "host": started.bind_host,
        "grpc_port": started.grpc_port,
        "http_port": started.http_port,
        "dashboard_port": started.dashboard_port,
    }
    last = _Last(files.name, str(files.directory), {name: getattr(files.written_listen, name) for name in _OPTIONS}, used)
    write_private(home.last_listen_file, msgspec.json.encode(last))


def as_last_time(home: Home, files: SiteFiles) -> tuple[SiteFiles, str]:
    """The files with what was used the last time, and what of it site.yaml has otherwise, in words.

    Not taken over: what the command line gives, what changed in site.yaml since, and where site.yaml asks for any free port.
    """
    try:
        last = msgspec.json.decode(home.last_listen_file.read_bytes(), type=_Last)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return files, ""  # never started here, or damaged: site.yaml holds
    if (last.site, last.site_dir) != (files.name, str(files.directory)):
        return files, ""
    written = {name: getattr(files.written_listen, name) for name in _OPTIONS}
    kept = {
        name: last.used[name]
        for name, value in written.items()
        if name not in files.given and value == last.written.get(name) and value != 0 and last.used.get(name, value) != value
    }
    listen = type(files.spec.listen).model_validate({**files.spec.listen.model_dump(), **kept})
    words = [f"{_OPTIONS[name]} {value} (site.yaml: {written[name]})" for name, value in kept.items()]
    return replace(files, spec=files.spec.model_copy(update={"listen": listen})), ", ".join(words)
