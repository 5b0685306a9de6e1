"""The files of a remote model, and their manifest.

This module selects the files that a model needs, verifies their digests, and reads and writes manifests. A manifest
lists the verified files of a directory.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_runtime.checkpoints.model_files import require_safe_name
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import shown

_log = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST_FILE = ".megatron-manifest.json"
"""File in which `megatron fetch` records the sizes and sha256 digests of the files of a directory."""
MAX_TRIES = 6
"""Maximum number of consecutive attempts without progress."""
_MIN_BYTES = 1 << 16
"""Minimum number of bytes by which an attempt counts as progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_OWN_PREFIX = ".megatron-"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_READ_BYTES = 1 << 20
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")
"""Names of the weight files that a model needs. consolidated*.safetensors has the same weights in another format."""
_ALWAYS_LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "coreml/*", ".git*", "*.md", "*.png", "*.jpg", "*.gif")


class HubError(ValueError):
    """Raised if the hub does not provide what was requested, and a retry does not help.

    The message names the remedy.
    """


class HubUnavailableError(OSError):
    """Raised if the hub cannot be reached or is overloaded. A retry may help.

    retry_after: seconds that an overloaded hub asks the client to wait; 0 if the hub names no time; None if no hub
                 responds.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WrongContentError(HubError):
    """Raised if the content of a file does not match the hub's list. The message names both digests."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model at a hub or in an object store.

    sha256:  digest of the content; None if the hub or the store does not list it.
    blob:    git's hash of the content, if the hub lists it.
    version: version of an object in a store. The version changes with the content, but is not a digest of it.
    """

    path: str
    size: int
    sha256: str | None
    blob: str | None
    version: str = ""

    @property
    def digest(self) -> str:
        """The digest of the content that the hub or the store lists; `version` if it lists none.

        In a cache, this text is the name of the file that has the content.
        """
        return self.sha256 or self.blob or self.version


@dataclass(frozen=True, slots=True)
class Listing:
    """The list of all files of one commit."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of the verified files in a directory. files: sha256 and size of each file, by path."""

    repository: str
    commit: str
    files: dict[str, dict[str, Any]]


Progress = Callable[[int, int, int], None]
"""Called with the bytes received so far, the bytes of all files, and the number of files."""


def silent(done: int, size: int, files: int) -> None: ...


def each_tenth(report: Progress) -> Progress:
    """Return a Progress that calls `report` at the start and after each tenth of the bytes."""
    reported = -1

    def progress(done: int, size: int, files: int) -> None:
        nonlocal reported
        tenths = done * 10 // size if size else 10
        if tenths > reported:
            reported = tenths
            report(done, size, files)

    return progress


def is_commit(name: object) -> bool:
    """Return whether a revision is the name of a commit, which is 40 or 64 lowercase hexadecimal digits."""
    return isinstance(name, str) and bool(_COMMIT.fullmatch(name))


def retried(
    call: Callable[[], T],
    wait: Callable[[float], object],
    *,
    reached: Callable[[], int] | None = None,
) -> T:
    """Call `call` and return its result. Repeat the call while the hub is overloaded, at most MAX_TRIES times.

    Raises the errors of `call`.

    wait:    called to sleep for a number of seconds: the hub's retry-after, or else a delay that doubles after each
             failure.
    reached: returns the number of bytes of the file that have been received. If given, `call` is also repeated when no
             hub responds. An attempt that has received more bytes than all earlier attempts does not count towards
             MAX_TRIES.
    """
    failures, furthest = 0, 0
    while True:
        try:
            return call()
        except HubUnavailableError as error:
            now = reached() if reached is not None else 0
            failures = 1 if now - furthest >= _MIN_BYTES else failures + 1
            furthest = max(furthest, now)
            if failures == MAX_TRIES or (error.retry_after is None and reached is None):
                raise
            seconds = min(_LONGEST_PAUSE, error.retry_after or _FIRST_PAUSE * 2 ** (failures - 1))
            _log.warning("%s; retrying in %.0f s", error, seconds)
            wait(seconds)


def choose(files: Sequence[RemoteFile], include: Sequence[str]) -> list[RemoteFile]:
    """Return the files that a model needs or, if `include` has patterns, the files that match them.

    Files are excluded if their names begin with the prefix of this program's own files.
    """
    files = [file for file in files if not file.path.startswith(_OWN_PREFIX)]
    if include:
        return [file for file in files if _matches(file, include)]
    kept = [file for file in files if not _matches(file, _ALWAYS_LEFT_OUT)]
    if any(file.path.endswith((".safetensors", ".gguf", ".distcp", ".packed")) for file in kept):
        distributed = any(file.path.endswith(".distcp") for file in kept)
        needed = ("common.pt",) if distributed else ()
        kept = [file for file in kept if file.path.endswith(needed) or not _matches(file, _OTHER_FORMATS)]
    if any(file.path in _MODEL_FILES for file in kept):
        kept = [file for file in kept if not _matches(file, ("consolidated*.safetensors",))]
    return kept


def _matches(file: RemoteFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)


def check_file(file: RemoteFile, path: Path) -> str | None:
    """Return the sha256 of the file at `path` if its content matches `file`, otherwise None.

    This function also flushes the file to disk (fsync), so that a manifest never lists a file that a power failure can
    lose.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    sha256 = listed = hashlib.sha256()
    if file.sha256 is None and file.blob is not None:
        # Git names contents by SHA-1; repositories in the SHA-256 format use SHA-256.
        kind = "sha256" if len(file.blob) == 64 else "sha1"
        listed = hashlib.new(kind, f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while data := content.read(_READ_BYTES):
            sha256.update(data)
            if listed is not sha256:
                listed.update(data)
        os.fsync(content.fileno())
    return sha256.hexdigest() if file.version or listed.hexdigest() == file.digest else None


def verify_directory(directory: Path, *, progress: Progress = silent) -> Manifest:
    """Read all files of a fetched directory again, compare them with its manifest, and return the manifest.

    Raises WrongContentError, which names every missing or changed file, and HubError if there is no manifest.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise HubError(f"{directory} has no {MANIFEST_FILE}: it was not made by `megatron fetch`")
    files = [RemoteFile(name, entry["size"], entry["sha256"], None) for name, entry in manifest.files.items()]
    wrong, done, size = [], 0, sum(file.size for file in files)
    for file in files:
        if check_file(file, directory / file.path) is None:
            path = directory / file.path
            actual = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            wrong.append(f"{file.path} ({actual}, should be {file.size} bytes with sha256 {file.sha256})")
        done += file.size
        progress(done, size, len(files))
    if wrong:
        raise WrongContentError(
            f"{len(wrong)} of {len(files)} files in {directory} differ from the fetched ones: {'; '.join(wrong)}: "
            f"remove them and run `megatron fetch {manifest.repository}@{manifest.commit} {directory}`"
        )
    return manifest


def read_manifest(directory: Path) -> Manifest | None:
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        manifest = Manifest(**json.loads(path.read_text()))
        for name, entry in manifest.files.items():
            require_safe_name(name)
            if not isinstance(entry["size"], int) or not isinstance(entry["sha256"], str):
                raise ValueError(f"{shown(name)} has no size or no sha256")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise HubError(f"{path} is damaged ({error}): remove it and fetch again") from error
    return manifest


def recorded_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in `directory` that a download has verified and that has not changed since.

    directory: a directory that cached_directory() has returned or that `megatron fetch` has written.
    """
    for own in (directory, directory.parent.parent / ".megatron" / directory.name):
        try:
            manifest = read_manifest(own)
        except HubError:  # the manifest is damaged, so it records nothing
            manifest = None
        if manifest is None:
            continue
        written = (own / MANIFEST_FILE).stat().st_mtime_ns
        digests = {}
        for name, entry in manifest.files.items():
            with suppress(OSError):
                status = (directory / name).stat()
                if status.st_size == entry["size"] and status.st_mtime_ns <= written:
                    digests[name] = entry["sha256"]
        return digests
    return {}


def write_manifest(manifest: Manifest, directory: Path) -> None:
    replace_text(directory / MANIFEST_FILE, json.dumps(asdict(manifest), indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically. A reader sees either the old or the new content."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)
