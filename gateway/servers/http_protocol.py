"""HTTP/1.1 with a bound on what comes before the body. uvicorn has one for its slower parser only."""

from __future__ import annotations

import asyncio
import importlib.util


def bounded_http(header_bytes: int) -> type[asyncio.Protocol] | str:
    """What uvicorn is to speak HTTP with: by httptools where it is installed, else by h11, whose bound is uvicorn's setting."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHttp(HttpToolsProtocol):
        _head_is_open = True
        _head_bytes = 0

        def data_received(self, data: bytes) -> None:
            if self._head_is_open:
                self._head_bytes += len(data)
                if self._head_bytes > header_bytes and self._head_is_open:
                    # What came in one piece with the end of the head may be body.
                    end = data.find(b"\r\n\r\n")
                    if end < 0 or self._head_bytes - len(data) + end > header_bytes:
                        self._refuse()
                        return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head_is_open, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_is_open, self._head_bytes = False, 0
            super().on_headers_complete()

        def _refuse(self) -> None:
            body = f"the headers are larger than {header_bytes} bytes; see spec.listen.max_headers of the Site\n".encode()
            head = f"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return BoundedHttp
