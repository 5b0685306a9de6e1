"""Structured logs: one JSON object per line, or the same fields as text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from megatron_operator.model.text import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("kopf", "asyncio", "aiohttp.access")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object per line. All non-ASCII and control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """One line per record. Further lines, such as tracebacks, are indented, so that no text can forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = printable(f"{when} {record.levelname:<7} {record.getMessage()}{fields}")
        if not record.exc_info:
            return line
        trace = printable(self.formatException(record.exc_info), lines=True)
        return "\n    ".join([line, *trace.splitlines()])


def configure(*, style: Literal["json", "text"] = "json", level: str = "INFO") -> None:
    """Configure the root logger: all records go to stderr in one format; of kopf, only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
