"""The termination message of a process, which the status of its container shows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_CHARACTERS = 2000
"""A container's status takes 4096 bytes."""


def write_termination_message(failure: BaseException, path: Path = TERMINATION_LOG) -> None:
    """Write why this process ends to the container's termination message, if there is a container: one line of JSON.

    reason: `failure.reason`, or its type; rank: `failure.rank`, or 0; remedy: `failure.remedy`, if it has one.
    """
    message = {
        "reason": getattr(failure, "reason", None) or type(failure).__name__,
        "rank": getattr(failure, "rank", 0),
        "message": str(failure)[:TERMINATION_CHARACTERS],
        "remedy": getattr(failure, "remedy", ""),
    }
    with contextlib.suppress(OSError):
        if path.exists():
            path.write_text(json.dumps(message) + "\n")
