"""The termination message of a container, which its status shows."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron_runtime.protocol import strict_json as json

TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_CHARACTERS = 2000
"""A container's status takes 4096 bytes."""


def write_termination_message(failure: BaseException, path: Path = TERMINATION_LOG) -> None:
    """Write the cause of this process's end to the container's termination log, if it exists, as one line of JSON.

    Its fields: `reason` is `failure.reason` or its type, `rank` is `failure.rank` or 0, `message`, `remedy`.
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
