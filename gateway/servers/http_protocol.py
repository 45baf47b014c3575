"""HTTP/1.1 with a bound on what comes before the body, and on the time in which a request must come. uvicorn has the first for
its slower parser only."""

from __future__ import annotations

import asyncio
import importlib.util

REQUEST_S = 60.0
"""A request must have come whole so long after its first byte, and the first one after its connection. Who sends a byte now and
then would hold a connection for ever."""


def bounded_http(header_bytes: int, request_s: float = REQUEST_S) -> type[asyncio.Protocol] | str:
    """What uvicorn is to speak HTTP with: by httptools where it is installed, else by h11, whose bound is uvicorn's setting."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHttp(HttpToolsProtocol):
        _head_is_open = True
        _head_bytes = 0
        _until: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_come()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_is_open:
                self._head_bytes += len(data)
                if self._head_bytes > header_bytes and self._head_is_open:
                    # What came in one piece with the end of the head may be body.
                    end = data.find(b"\r\n\r\n")
                    if end < 0 or self._head_bytes - len(data) + end > header_bytes:
                        self._refuse(
                            "431 Request Header Fields Too Large",
                            f"the headers are larger than {header_bytes} bytes; see spec.listen.max_headers of the Site",
                        )
                        return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._head_is_open, self._head_bytes = True, 0
            self._wait_for_request()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_is_open, self._head_bytes = False, 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._has_come()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            if self._until is not None:  # the next request waited for this answer
                self._wait_for_request()
            super().on_response_complete()

        def _wait_for_request(self) -> None:
            self._has_come()
            self._until = self.loop.call_later(request_s, self._give_up)

        def _has_come(self) -> None:
            if self._until is not None:
                self._until.cancel()
                self._until = None

        def _give_up(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if self.pipeline or (answering and self._head_is_open):
                self._wait_for_request()  # it waits for the answer before it, as it may
            elif self._head_is_open:
                self._refuse("408 Request Timeout", f"the request has not come whole in {request_s:g} s")
            else:
                self.transport.close()  # the one who answers is told that the client left

        def _refuse(self, status: str, message: str) -> None:
            body = f"{message}\n".encode()
            head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return BoundedHttp
