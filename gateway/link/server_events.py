"""Server-sent events, as they come in pieces of any size."""

from __future__ import annotations

from gateway.api.errors import ErrorCode, YardError

LONGEST_BYTES = 16 * 2**20


class EventReader:
    """Gives the data of each event once it is whole: lines `data: …` joined, up to an empty line. All others are left out.

    YardError(INTERNAL) for one longer than LONGEST_BYTES.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if len(self._rest) + self._size > LONGEST_BYTES:
            raise YardError(ErrorCode.INTERNAL, f"the server sent an event of more than {LONGEST_BYTES} bytes")
        return found
