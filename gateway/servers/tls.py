"""TLS of the public servers, renewed without a restart: new connections get the newest certificate that could be read."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc

from gateway.api.errors import ErrorCode, YardError
from gateway.api.runtime import TlsFiles

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0


class ServerTls:
    """YardError when the files cannot be used at the start; later ones that cannot are left aside, with a line in the log."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.client_ca:
            self.context.verify_mode = ssl.CERT_REQUIRED
        try:
            self._seen = self._stamp()
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise YardError(
                ErrorCode.INVALID,
                f"TLS: {error} ({files.cert}, {files.key}{', ' + files.client_ca if files.client_ca else ''}); "
                "see spec.listen.tls of the Site",
            ) from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._configuration, lambda: self._configuration, require_client_authentication=bool(self._files.client_ca)
        )

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> None:
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._load()
        except (OSError, ssl.SSLError) as error:
            log.warning("TLS: the renewed files cannot be used, going on with the ones before: %s", error)
            return
        self._seen = stamp
        log.info("TLS: took over %s", self._files.cert)

    def _load(self) -> None:
        """A pair that does not fit together, as in the middle of a renewal, fails before anything is taken over."""
        files = self._files
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trial.load_cert_chain(files.cert, files.key)
        roots = Path(files.client_ca).read_bytes() if files.client_ca else None
        if files.client_ca:
            trial.load_verify_locations(files.client_ca)
            self.context.load_verify_locations(files.client_ca)
        self.context.load_cert_chain(files.cert, files.key)
        pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
        self._configuration = grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        paths = [path for path in (self._files.cert, self._files.key, self._files.client_ca) if path]
        return tuple((info.st_mtime_ns, info.st_ino) for info in (Path(path).stat() for path in paths))
