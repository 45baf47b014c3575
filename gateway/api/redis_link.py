"""One way to reach Redis or Valkey: `redis://`, `rediss://`, `unix://` and `redis+sentinel://host:port[,host:port]/master[/db]`."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 5.0


def connect(url: str, *, call_timeout_s: float | None = CALL_TIMEOUT_S) -> Redis:
    """A lazy client; the first call connects. ValueError names what is wrong with the URL, never its password.

    `call_timeout_s` None is for connections that wait, such as subscriptions.
    """
    parts = urlsplit(url)
    options = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": call_timeout_s,
        "socket_keepalive": True,
        "health_check_interval": 10,
        "decode_responses": False,
    }
    if parts.scheme in ("redis", "rediss", "unix"):
        if parts.scheme == "unix":
            options.pop("socket_keepalive")
        return Redis.from_url(url, **options)
    if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
        return _sentinel(url, options)
    raise ValueError(f"redis URL scheme {parts.scheme!r} is not one of redis, rediss, unix, redis+sentinel, rediss+sentinel")


def _sentinel(url: str, options: dict) -> Redis:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    path = [piece for piece in parts.path.split("/") if piece]
    if not hosts or not path:
        raise ValueError("a sentinel URL needs hosts and a master name: redis+sentinel://host:26379,host2:26379/mymaster/0")
    addresses = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        addresses.append((name, int(port)) if name else (port, 26379))
    user, _, password = credentials.partition(":")
    query = dict(parse_qsl(parts.query))
    if parts.scheme == "rediss+sentinel":
        options["ssl"] = True
    sentinel_options = {key: query[key] for key in ("username", "password") if key in query}
    sentinel = Sentinel(addresses, sentinel_kwargs={**sentinel_options, "socket_connect_timeout": CONNECT_TIMEOUT_S})
    return sentinel.master_for(
        path[0], db=int(path[1]) if len(path) > 1 else 0, username=user or None, password=password or None, **options
    )
