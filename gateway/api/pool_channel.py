"""How processes of a site reach a pool driver: its endpoint says whether it speaks TLS."""

from __future__ import annotations

import grpc

from gateway.api.grpc_options import CLIENT_OPTIONS

TLS_SCHEME = "tls://"
"""Before host:port in the endpoint of a driver that speaks TLS: so also one that began before the site did is found."""


def pool_channel(endpoint: str, secret: str) -> grpc.aio.Channel:
    """For one connection after the other; open another one once a connection could not be made."""
    if not endpoint.startswith(TLS_SCHEME):
        return grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS)
    from gateway.api.site_tls import NAME, site_tls  # imports cryptography, which sites on loopback do without

    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", NAME)]
    return grpc.aio.secure_channel(endpoint.removeprefix(TLS_SCHEME), site_tls(secret).channel_credentials(), options=options)
