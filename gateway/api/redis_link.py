"""One way to reach Redis or Valkey: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port[,host:port]/master[/db]` and
`redis+cluster://host:port[,host:port]/site`; the last two also as `rediss+…`."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

from gateway.api.redis_cluster import connect_cluster

_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_CLUSTER = ("redis+cluster", "rediss+cluster")
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
    if parts.scheme in _SENTINEL:
        return _sentinel(url, options)
    if parts.scheme in _CLUSTER:
        return _cluster(url, options)
    known = ", ".join(("redis", "rediss", "unix", *_SENTINEL, *_CLUSTER))
    raise ValueError(f"redis URL scheme {parts.scheme!r} is not one of {known}")


def with_site(url: str, site: str) -> str:
    """The URL as the processes of a site use it: that of a cluster names the site, by which its keys are found."""
    parts = urlsplit(url)
    return parts._replace(path=f"/{site}").geturl() if parts.scheme in _CLUSTER else url


def _cluster(url: str, options: dict) -> Redis:
    parts = urlsplit(url)
    seeds, user, password = _hosts(parts.netloc, 6379)
    site = parts.path.strip("/")
    if not seeds or not site:
        raise ValueError("a cluster URL needs hosts and the site's name: redis+cluster://host:6379,host2:6379/local")
    query = dict(parse_qsl(parts.query))
    return connect_cluster(
        seeds, site, tls=parts.scheme == "rediss+cluster", username=user, password=password, **{**query, **options}
    )


def _hosts(netloc: str, default_port: int) -> tuple[list[tuple[str, int]], str | None, str | None]:
    """(addresses, user, password) of `user:password@host:port,host:port`."""
    credentials, _, hosts = netloc.rpartition("@")
    addresses = []
    for host in filter(None, hosts.split(",")):
        name, _, port = host.rpartition(":")
        addresses.append((name, int(port)) if name else (port, default_port))
    user, _, password = credentials.partition(":")
    return addresses, unquote(user) or None, unquote(password) or None


def _sentinel(url: str, options: dict) -> Redis:
    parts = urlsplit(url)
    addresses, user, password = _hosts(parts.netloc, 26379)
    path = [piece for piece in parts.path.split("/") if piece]
    if not addresses or not path:
        raise ValueError("a sentinel URL needs hosts and a master name: redis+sentinel://host:26379,host2:26379/mymaster/0")
    query = dict(parse_qsl(parts.query))
    if parts.scheme == "rediss+sentinel":
        options["ssl"] = True
    sentinel_options = {key: query[key] for key in ("username", "password") if key in query}
    sentinel = Sentinel(addresses, sentinel_kwargs={**sentinel_options, "socket_connect_timeout": CONNECT_TIMEOUT_S})
    return sentinel.master_for(path[0], db=int(path[1]) if len(path) > 1 else 0, username=user, password=password, **options)
