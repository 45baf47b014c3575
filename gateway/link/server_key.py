"""How a server that runs elsewhere is trusted, and what it is shown: TLS and the key that the specification names."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from gateway.api.config import ServerSpec
from gateway.api.errors import unavailable


def key_headers(spec: ServerSpec) -> dict[str, str]:
    """Read anew with each call, so that a key may be changed. YardError names what is missing, never what is there."""
    if spec.key_env is not None:
        key = os.environ.get(spec.key_env, "")
        where = f"server.key_env: the variable {spec.key_env} is not set in the gateways' environment"
    elif spec.key_file is not None:
        where = f"server.key_file: {spec.key_file}"
        try:
            key = Path(spec.key_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise unavailable(f"{where} cannot be read here: {getattr(error, 'strerror', None) or 'not text'}") from None
        where += " is empty"
    else:
        return {}
    if not key:
        raise unavailable(f"{where}; set it where `yard up` starts")
    if not (key.isascii() and key.isprintable()):
        raise unavailable(f"{where.removesuffix(' is empty')}: what is there is no header: it must be printable ASCII")
    return {spec.key_header: f"Bearer {key}" if spec.key_header == "authorization" else key}


def authorities(spec: ServerSpec) -> bytes | None:
    """The PEM of `server.ca`; None for the system's."""
    if spec.ca is None:
        return None
    try:
        return Path(spec.ca).expanduser().read_bytes()
    except OSError as error:
        raise unavailable(f"server.ca: {spec.ca} cannot be read here: {error.strerror}") from error


def ssl_context(spec: ServerSpec) -> ssl.SSLContext:
    pem = authorities(spec)
    try:
        return ssl.create_default_context(cadata=None if pem is None else pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise unavailable(f"server.ca: {spec.ca} is no PEM of authorities: {error}") from error


def system_authorities() -> bytes | None:
    """As `ssl` trusts them; None where they are not in one file. gRPC has a list of its own otherwise."""
    file = ssl.get_default_verify_paths().cafile
    return Path(file).read_bytes() if file and Path(file).is_file() else None
