"""One file of the hub, whole and with the right digest, over however many attempts it takes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatron_runtime.checkpoints.hub.api import HubApi, HubError, HubUnavailableError, Listing, RemoteFile

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_ATTEMPTS = 6
"""In a row that brought next to nothing."""
_LEAST_BYTES = 1 << 16
"""What a connection brings at least, in all and within each _PACE_SECONDS: one that gives less is broken off."""
_PACE_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_READ_BYTES = 1 << 20


class WrongContentError(HubError):
    """A file is not what the hub said it would be. The message names both digests."""


def fetch_file(
    api: HubApi,
    listing: Listing,
    file: RemoteFile,
    *,
    target: Path,
    partial: Path,
    received: Callable[[int], None],
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Get `file` to `target` and return its sha256.

    target, partial: in directories that exist.
    partial:  holds what has come so far; what is there from before is not fetched again.
    received: is told of bytes that are there, also of those from before; of less than nothing when they were wrong.
    wait:     lets a number of seconds pass.
    clock:    in seconds.

    Raises HubError, WrongContentError, HubUnavailableError once attempts are used up.
    """
    content = Content(file)
    for kept in (True, False):
        had = content.read(partial) if kept else 0
        received(had)
        _append(api, listing, file, partial=partial, content=content, received=received, wait=wait, clock=clock)
        if content.is_right:
            partial.replace(target)
            return content.sha256
        partial.unlink()
        received(-content.size)
        wrong, content = content, Content(file)
        _log.warning("%s came with digest %s, it should be %s", file.path, wrong.digest, wrong.wanted)
    raise WrongContentError(
        f"{file.path} of {listing.repository}@{listing.commit} came twice with digest {wrong.digest}, the hub says "
        f"{wrong.wanted}: something between here and the hub changes it"
    )


def check_file(file: RemoteFile, path: Path) -> str | None:
    """The sha256 of the file at `path` if it is `file`, else None."""
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    content = Content(file)
    content.read(path)
    return content.sha256 if content.is_right else None


class Content:
    """What has come of a file, as its digests: sha256 always, and git's where the hub knows no other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._git: Any = None
        if file.sha256 is None:
            # Git names contents by SHA-1, or by SHA-256 in a repository that was made so.
            kind = "sha256" if len(file.blob or "") == 64 else "sha1"
            self._git = hashlib.new(kind, f"blob {file.size}\0".encode(), usedforsecurity=False)
        self.size = 0

    def add(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self.size += len(data)

    def read(self, path: Path) -> int:
        """Add what is in a file, if there is one; return its size."""
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                self.add(data)
        return self.size

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def digest(self) -> str:
        """The one that can be compared."""
        return self.sha256 if self._git is None else str(self._git.hexdigest())

    @property
    def wanted(self) -> str:
        return self._file.sha256 or self._file.blob or ""

    @property
    def is_right(self) -> bool:
        return self.size == self._file.size and self.digest == self.wanted


def _append(
    api: HubApi,
    listing: Listing,
    file: RemoteFile,
    *,
    partial: Path,
    content: Content,
    received: Callable[[int], None],
    wait: Callable[[float], object],
    clock: Callable[[], float],
) -> None:
    """Until the file has its size. What is written is not kept in this process: a kill loses none of it."""
    failures = 0
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "ab", 0) as out:
        while content.size < file.size:
            before = content.size
            pace = _Pace(clock)
            try:
                with api.open(listing, file, start=content.size) as pieces:
                    for piece in pieces:
                        out.write(piece)
                        content.add(piece)
                        received(len(piece))
                        if content.size > file.size:
                            return
                        pace.require(len(piece), file.path)
                if content.size < file.size:
                    raise HubUnavailableError(f"{file.path} ended after {content.size} of {file.size} bytes")
            except HubUnavailableError as error:
                gained = content.size - before
                failures = 1 if gained >= min(_LEAST_BYTES, file.size - before) else failures + 1
                if failures >= _ATTEMPTS:
                    raise HubUnavailableError(
                        f"{error}; {content.size} of {file.size} bytes of {file.path} are here: run this again to go on"
                    ) from error
                _pause(error, failures, wait)
        # The manifest will vouch for the whole file: it must outlive the machine as the manifest does.
        os.fsync(out.fileno())


class _Pace:
    """What comes over one connection, compared with the least that it must bring."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since, self._bytes = clock(), 0

    def require(self, count: int, name: str) -> None:
        """Count bytes. Raises HubUnavailableError once they came too slowly."""
        self._bytes += count
        passed = self._clock() - self._since
        if passed < _PACE_SECONDS:
            return
        if self._bytes < _LEAST_BYTES:
            raise HubUnavailableError(f"{name} came at {self._bytes} bytes in {passed:.0f} s")
        self._since, self._bytes = self._clock(), 0


def patiently(ask: Callable[[], _Answer], *, wait: Callable[[float], object]) -> _Answer:
    """What `ask` returns, asked again while the hub says that it is overloaded. Raises what `ask` raises."""
    for failures in range(1, _ATTEMPTS):
        try:
            return ask()
        except HubUnavailableError as error:
            if not error.answered:
                raise
            _pause(error, failures, wait)
    return ask()


def _pause(error: HubUnavailableError, failures: int, wait: Callable[[float], object]) -> None:
    seconds = min(_LONGEST_PAUSE, error.retry_after or _FIRST_PAUSE * 2 ** (failures - 1))
    _log.warning("%s; trying again in %.0f s", error, seconds)
    wait(seconds)
