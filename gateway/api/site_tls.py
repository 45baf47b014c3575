"""Mutual TLS among gateways, controller and pool drivers, without a file: the site's authority follows from the site's secret.

Each process makes itself certificates of that authority, and trusts no other. They are short-lived and made anew long before
they end, for each connection that a client opens and each that a server takes; what is open goes on. As strong as the secret,
which `yard up` draws with 256 bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAME = "modelyard"
"""In every certificate, and what clients look for: addresses of pools come and go."""
LIFE_S = 7 * 86400.0
RENEW_S = LIFE_S / 7
_SKEW_S = 86400.0  # clocks of nodes may be apart
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_AUTHORITY = "modelyard site"
_AUTHORITY_YEARS = (2000, 2999)


class SiteTls:
    """Of one process. Any thread may call."""

    def __init__(self, secret: str, now: Callable[[], float] = time.time) -> None:
        # 40 bytes: modulo the order of the curve, no key is likelier than another by more than 2^-64.
        derived = HKDF(hashes.SHA256(), 40, salt=None, info=b"modelyard site authority").derive(secret.encode())
        self._authority_key = ec.derive_private_key(int.from_bytes(derived) % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        self._authority = _authority(self._authority_key)
        self._now = now
        self._lock = threading.Lock()
        self._made_s = float("-inf")
        self._pair = (b"", b"")

    def server_credentials(self) -> grpc.ServerCredentials:
        """Asked anew for each connection."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._configuration, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel: what connects later than LIFE_S needs another."""
        return grpc.ssl_channel_credentials(self._authority, *self._current())

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._current()], root_certificates=self._authority)

    def _current(self) -> tuple[bytes, bytes]:
        """(private key, certificate) in PEM."""
        with self._lock:
            now = self._now()
            if not 0 <= now - self._made_s < RENEW_S:
                self._pair, self._made_s = self._issue(now), now
            return self._pair

    def _issue(self, now: float) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        begin, end = (datetime.fromtimestamp(now + seconds, UTC) for seconds in (-_SKEW_S, LIFE_S))
        made = (
            _certificate(NAME, key.public_key(), begin, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
            .sign(self._authority_key, hashes.SHA256())
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return private, made.public_bytes(serialization.Encoding.PEM)


@lru_cache(maxsize=4)
def site_tls(secret: str) -> SiteTls:
    """The one of this process."""
    return SiteTls(secret)


def _authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    begin, end = (datetime(year, 1, 1, tzinfo=UTC) for year in _AUTHORITY_YEARS)
    made = _certificate(_AUTHORITY, key.public_key(), begin, end).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _certificate(name: str, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime) -> x509.CertificateBuilder:
    def named(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(_AUTHORITY))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
