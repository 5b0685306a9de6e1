"""A directory that is there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DestinationError(ValueError):
    """Nothing can be written there. The message names the directory and the remedy."""


@contextmanager
def new_directory(directory: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give an empty directory beside `directory`; it takes that name when the block ends, and is gone if it fails.

    replace: a directory of that name may be there and is removed at the end; otherwise it must be absent or empty.

    What a process left that was killed is removed by the next one. Raises DestinationError.
    """
    directory = directory.absolute()
    if directory.exists() and not directory.is_dir():
        raise DestinationError(f"{directory} is no directory: name a new one")
    if not replace and directory.is_dir() and any(directory.iterdir()):
        raise DestinationError(f"{directory} is not empty: name a new directory, or let it be replaced")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial")
    lock = _lock(partial)
    try:
        _clear(partial)
        yield partial
        _sync(partial)
        if directory.is_dir():
            shutil.rmtree(directory)
        partial.rename(directory)
        _sync_one(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(partial: Path) -> int:
    """Hold the directory itself, so that nobody else writes to it; the system lets go if this process dies."""
    partial.mkdir(exist_ok=True)
    held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_ino != partial.stat().st_ino:
            raise BlockingIOError(f"{partial} was just replaced")
    except OSError as error:
        os.close(held)
        raise DestinationError(f"another process is writing {partial}: wait for it or choose another name") from error
    return held


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            _sync_one(Path(root, name))
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
