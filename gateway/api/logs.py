"""Logs of a process as one JSON object a line, each with the id of the request that it is about, if any."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILE_BYTES = 16 * 2**20
FILES = 3
LOOK_RECORDS = 64
_LOGGERS = ("gateway", "workers")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """`extra` of a call becomes fields. What cannot be JSON is shown as text."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class _BoundedFile(RotatingFileHandler):
    """Looks at its size now and then; the original formats each record a second time to do so."""

    _records = 0

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        self._records += 1
        return self._records % LOOK_RECORDS == 0 and bool(super().shouldRollover(record))


def install(run_dir: Path, process: str) -> Path:
    """Beside what the process logs already. The file has the process's name and is bounded; siblings on a node have their own."""
    directory = run_dir / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{process}.jsonl"
    handler = _BoundedFile(file, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", delay=True)
    handler.setFormatter(JsonFormatter(process))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for old in [old for old in logger.handlers if isinstance(old.formatter, JsonFormatter)]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return file
