"""File locks between processes. The kernel releases the lock if the process is killed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster.progress import Steps


@contextmanager
def locked(path: Path, steps: Steps, *, reason: str) -> Iterator[None]:
    """Return a context that holds a lock on the file `path`, which is created if it does not exist.

    reason: what a caller waits for if the lock is in use, such as "another build of the same programs".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with steps.step(f"wait for {reason}"):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
