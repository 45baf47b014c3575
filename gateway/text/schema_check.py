"""Whether answers of a model can be held to a JSON schema: asked by gateways before a request goes anywhere.

Some schemas of a few characters take minutes and gigabytes to compile (`multipleOf` of a large prime), and nothing stops a
library that is at it. So the first to compile a schema is a process of its own, with limits; ranks get what it was quick with.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.api.errors import invalid, unavailable

CHECK_S = 4.0  # what clients write takes less than 0.3 s
START_S = 60.0
_REMEMBERED = 256


class _Worker:
    """The process, as its one thread here has it: started when the first schema comes, and anew after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def refusal(self, directory: Path, eos_ids: Sequence[int], schema: str) -> str:
        """Empty, or why not. OSError: the process does not run."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-m", "gateway.text.schema_worker"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps([str(directory), list(eos_ids), schema]).encode() + b"\n")
        pipe.flush()
        if self._line(START_S) is None:
            self._end()
            raise OSError("the process that compiles JSON schemas does not start")
        answer = self._line(CHECK_S)
        if answer is None:
            self._end()
            return f"it takes more than {CHECK_S:.0f} s or too much memory to compile; simplify its multipleOf, pattern or bounds"
        return json.loads(answer)

    def _line(self, timeout_s: float) -> bytes | None:
        """None: it ended, or did not answer in time."""
        assert self._process is not None
        pipe = self._process.stdout
        assert pipe is not None
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, give_up - time.monotonic()))[0]:
                return None
            more = os.read(pipe.fileno(), 65536)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> None:
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()


_worker = _Worker()
_thread = ThreadPoolExecutor(1, "schemas")  # not those that tokenize for others


class SchemaCheck:
    """Of one model. Nothing is read before the first schema comes, and one that was seen lately is not compiled again."""

    def __init__(self, model: str, directory: Path, eos_ids: Sequence[int]) -> None:
        self._model = model
        self._directory = directory
        self._eos_ids = sorted(eos_ids)
        self._seen: dict[bytes, str] = {}  # digest -> what is wrong with it; the oldest first

    async def check(self, schema: str, field: str) -> None:
        """YardError(INVALID) names the field and what is wrong."""
        digest = hashlib.sha256(schema.encode()).digest()
        wrong = self._seen.get(digest)
        if wrong is None:
            wrong = await self._ask(schema)
            self._seen[digest] = wrong
            if len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]
        if wrong:
            raise invalid(f"{field}: answers of model `{self._model}` cannot be held to it: {wrong}", field=field)

    async def _ask(self, schema: str) -> str:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(_thread, _worker.refusal, self._directory, self._eos_ids, schema)
        except OSError as error:
            raise unavailable(f"model `{self._model}`: its JSON schemas cannot be checked here: {error}", 5.0) from error
