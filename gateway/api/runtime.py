"""What every process of a site is started with."""

from __future__ import annotations

from typing import Literal

import msgspec

SECRET_METADATA_KEY = "modelyard-secret"
POOL_MEMORY_RESOURCE = "modelyard_pool_mib"
"""Ray's custom resource: host memory of a node that cpu pools may take."""


class TlsFiles(msgspec.Struct, frozen=True):
    """Absolute paths. `client_ca` empty: clients show no certificate."""

    cert: str
    key: str
    client_ca: str = ""


class Runtime(msgspec.Struct, frozen=True):
    """Given to each Serve application when it is bound. `redis_url` and `secret` are never printed (rule 15)."""

    site: str
    redis_url: str
    secret: str  # internal calls carry it; made by `yard up`
    cache_dir: str  # converted weights and tokenizers, by digest
    run_dir: str  # sockets, logs, pid files
    bind_host: str  # where gateways and drivers listen: 127.0.0.1, or "node" for the node's own address
    grpc_port: int = 50051
    http_port: int = 8000
    version: str = "0.1.0"
    trtllm: str = ""  # EngineSpec as JSON
    quotas_without_redis: Literal["allow", "deny", "last"] = "last"
    tls: TlsFiles | None = None
    internal_tls: bool = False  # among gateways, controller and pool drivers; see `site_tls`
    max_message_bytes: int = 32 * 2**20
    max_header_bytes: int = 64 * 2**10
    streams_per_client: int = 4096
    ray_grows: bool = True  # its nodes come and go by themselves: what has no room now may get it

    def __repr__(self) -> str:
        return f"Runtime(site={self.site!r}, run_dir={self.run_dir!r}, bind_host={self.bind_host!r})"
