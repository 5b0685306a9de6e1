"""Formats the log records of every component as JSON or text, one line each, and writes termination messages.

A record about a client's request has the field `request_id`. In a task that serves a request, the context variable
REQUEST_ID provides the id. Elsewhere, the caller passes of_request() as `extra`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatron_runtime.process.gpu_failures import DRIVER, DRIVER_VERSION, gpu_failure, nvidia_driver
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import printable

Style: TypeAlias = Literal["json", "text"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the running task serves; empty outside of requests."""
TERMINATION_LOG = Path("/dev/termination-log")
"""The termination log of a container. The container's status shows its content."""
TERMINATION_CHARACTERS = 2000
"""Maximum length of a termination message, because a container's status accepts 4096 bytes."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def of_request(request_id: str) -> dict[str, str]:
    """Return the `extra` argument of a log call about a request. Returns an empty dict if the request has no id."""
    return {"request_id": request_id} if request_id else {}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the log call added to the record, and the id of the request that the task serves."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if request_id := REQUEST_ID.get():
        extra.setdefault("request_id", request_id)
    return extra


class JsonFormatter(logging.Formatter):
    """A formatter that writes each record as one line with a JSON object.

    All non-ASCII and control characters are escaped.
    """

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
    """A formatter that writes each record as one line of text.

    Additional lines, such as tracebacks, are indented, so that no text can forge a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = printable(f"{when} {record.levelname} {record.name}: {record.getMessage()}{fields}")
        if not record.exc_info:
            return line
        trace = printable(self.formatException(record.exc_info), lines=True)
        return "\n    ".join([line, *trace.splitlines()])


def configure(*, style: Style, level: str, quiet: Iterable[str] = ()) -> None:
    """Configure the root logger. All records go to standard error in one format.

    quiet: loggers that log only warnings and errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in quiet:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def write_termination_message(
    failure: BaseException, path: Path = TERMINATION_LOG, *, driver_version: Path = DRIVER_VERSION
) -> None:
    """Write the cause of this process's failure to the container's termination log, as one line of JSON.

    Do nothing if the termination log does not exist.

    Fields:
        reason:  `failure.reason`, otherwise the cause in the table of GPU failures, otherwise the type of `failure`.
        rank:    `failure.rank` or 0.
        message: text of the failure. For a failure of the driver, it includes the version of the node's driver.
        remedy:  the remedy in the table, otherwise `failure.remedy`, otherwise empty.
    """
    known = gpu_failure(str(failure))
    driver = nvidia_driver(driver_version) if known and known.cause == DRIVER else ""
    message = {
        "reason": getattr(failure, "reason", None) or (known.cause if known else type(failure).__name__),
        "rank": getattr(failure, "rank", 0),
        "message": str(failure)[:TERMINATION_CHARACTERS]
        + (f" (NVIDIA driver of the node: {driver})" if driver else ""),
        "remedy": known.remedy if known else getattr(failure, "remedy", ""),
    }
    with contextlib.suppress(OSError):
        if path.exists():
            path.write_text(json.dumps(message) + "\n")
