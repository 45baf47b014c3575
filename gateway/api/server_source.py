"""What a model's `source` says when it is a server that already runs: `openai+http://host:port/v1#name` and its kin. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from urllib.parse import urlsplit

FORMS = "openai+http://HOST:PORT/v1#NAME, openai+https://…, trtllm+grpc://HOST:PORT or trtllm+grpcs://…"

_SCHEMES: dict[str, tuple[Literal["openai", "trtllm"], bool, int]] = {
    # scheme -> protocol, TLS, the port when none is named (0: one must be)
    "openai+http": ("openai", False, 80),
    "openai+https": ("openai", True, 443),
    "trtllm+grpc": ("trtllm", False, 0),
    "trtllm+grpcs": ("trtllm", True, 0),
}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`path` is that of OpenAI's endpoints, without a slash at its end; `model` what the server calls it, "": its only one."""

    protocol: Literal["openai", "trtllm"]
    tls: bool
    host: str
    port: int
    path: str = ""
    model: str = ""

    @property
    def target(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.target}{self.path}"


def names_server(source: str) -> bool:
    """Whether it looks like one, whatever else is wrong with it."""
    return source.partition("://")[0] in _SCHEMES


@lru_cache(maxsize=1024)
def server_address(source: str) -> ServerAddress | None:
    """None for a source that is files. ValueError for one that looks like a server and cannot be one."""
    if "://" not in source:
        return None
    parts = urlsplit(source)
    known = _SCHEMES.get(parts.scheme)
    if known is None:
        raise ValueError(f"source: {parts.scheme}:// is not known; a server that runs elsewhere is {FORMS}")
    protocol, tls, usual_port = known
    if parts.username is not None or parts.password is not None:
        raise ValueError("source: it must hold no credentials, as everybody can read it; name them in server.key_env or key_file")
    try:
        port = parts.port or usual_port
    except ValueError as error:
        raise ValueError(f"source: {error}") from error
    if not parts.hostname or not port:
        raise ValueError(f"source: it names no host and port; write {FORMS}")
    if parts.query:
        raise ValueError("source: it has a query (?…), which servers are not asked with; leave it out")
    path = parts.path.rstrip("/")
    if protocol == "trtllm" and (path or parts.fragment):
        raise ValueError(f"source: {parts.scheme}:// takes a host and a port only, as one such server has one model")
    return ServerAddress(protocol, tls, parts.hostname, port, path, parts.fragment)
