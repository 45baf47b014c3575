"""How `yard` reaches a gateway that speaks TLS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import grpc
import msgspec

from gateway.api.config import TlsSpec
from gateway.api.errors import invalid

CA_VARIABLE = "MODELYARD_CA"
CERT_VARIABLE = "MODELYARD_CERT"
KEY_VARIABLE = "MODELYARD_KEY"
SYSTEM_CA = "system"


class ClientTls(msgspec.Struct, frozen=True):
    """Paths. `ca` `system`: the authorities that this machine trusts. `cert` and `key` where the gateway asks for them."""

    ca: str
    cert: str = ""
    key: str = ""
    name: str = ""  # the name in the certificate to look for, where it is not the address

    def credentials(self) -> grpc.ChannelCredentials:
        roots = None if self.ca == SYSTEM_CA else _read(self.ca)
        key, cert = (_read(self.key), _read(self.cert)) if self.cert else (None, None)
        return grpc.ssl_channel_credentials(roots, key, cert)

    @property
    def options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []


def of_site(spec: TlsSpec | None, directory: Path) -> ClientTls | None:
    """For `yard` on a node of the site: it shows the gateway's own certificate where one is asked for."""
    if spec is None:
        return None
    cert, key = (str(directory / path) for path in (spec.cert, spec.key))
    shown = (cert, key) if spec.client_ca else ("", "")
    return ClientTls(str(directory / spec.ca) if spec.ca else cert, *shown, name=spec.name)


def of_environment(environment: Mapping[str, str] = os.environ) -> ClientTls | None:
    """None without MODELYARD_CA: plain text."""
    ca = environment.get(CA_VARIABLE)
    cert, key = environment.get(CERT_VARIABLE, ""), environment.get(KEY_VARIABLE, "")
    if bool(cert) != bool(key):
        raise invalid(f"set both {CERT_VARIABLE} and {KEY_VARIABLE}, or neither")
    return ClientTls(ca, cert, key) if ca else None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}; see {CA_VARIABLE}, or spec.listen.tls of the Site") from error
