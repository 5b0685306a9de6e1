"""Directories in shared memory for the weights that an engine receives. Imports neither vLLM nor torch.

SUSPEND ends vLLM's processes, but keeps the directories. If an engine is killed, its directories remain until the next
engine on the same machine or in the same pod removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megatron-weights-"


class SharedMemory:
    """The directories of one engine in shared memory. The first call of path() creates their parent directory."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1

    def path(self, name: str) -> str:
        """Return the path of the directory `name`, which may not exist yet.

        Raises OSError if this machine has no shared memory.
        """
        if self._root is None:
            remove_unused()
            self._root, self._lock = _locked_directory()
        return str(self._root / name)

    def holds(self, path: str) -> bool:
        return self._root is not None and Path(path).parent == self._root

    def keep(self, *paths: str) -> None:
        """Remove all directories of this engine except `paths`."""
        for each in self._root.iterdir() if self._root is not None else ():
            if str(each) not in paths:
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Remove all directories of this engine. Idempotent."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = None


def _locked_directory() -> tuple[Path, int]:
    """Return a new directory, and a descriptor that holds its lock as long as this process runs."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)  # another engine removed it before it was locked


def remove_unused() -> None:
    """Remove the directories that killed engines left."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another engine removes it, or it belongs to another user
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
