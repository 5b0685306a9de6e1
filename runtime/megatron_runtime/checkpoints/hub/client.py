"""The hub's HTTP API as far as a download needs it: list the files of a revision, and transfer one of them.

Nothing that a hub sends is used before it is checked: names of commits and files become paths, sizes limit what is
written, contents are compared with their digests, and answers, redirects and slow connections have limits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

import httpx

from megatron_runtime.checkpoints.hub import HUB_PREFIX, hf_home
from megatron_runtime.checkpoints.model_files import UnsafeNameError, require_safe_name
from megatron_runtime.protocol.text import escaped, shown

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_LISTING_BYTES, MAX_FILES = 64 << 20, 100_000
"""Limits of the list of files of a repository."""
LISTING_SECONDS = 120.0
"""Time limit for the whole list of files."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SIZE = 1 << 50
_MAX_REDIRECTS = 8
_TIMEOUT = httpx.Timeout(30, connect=10)
_UNCOMPRESSED = {"accept-encoding": "identity"}

_ATTEMPTS = 6
"""Consecutive attempts without progress."""
_LEAST_BYTES, _PACE_SECONDS = 1 << 16, 60.0
"""A connection that transfers fewer bytes in that time is closed; an attempt that transfers fewer is no progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_READ_BYTES = 1 << 20


class HubError(ValueError):
    """The hub does not provide what was requested, and a retry does not help. The message names the remedy."""


class HubUnavailableError(OSError):
    """The hub cannot be reached or is overloaded; a retry may help.

    answered:    the hub was reached.
    retry_after: seconds, if the hub named them.
    """

    def __init__(self, message: str, *, answered: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.answered = answered
        self.retry_after = retry_after


class WrongContentError(HubError):
    """The content of a file does not match the hub's list. The message names both digests."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A revision of a repository: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse `ORG/NAME[@REVISION]`, with or without `hf:` before it. Raises HubError."""
        name, _, revision = text.removeprefix(HUB_PREFIX).removeprefix("//").partition("@")
        if not _REPOSITORY.fullmatch(name) or ".." in name or not all(len(part) <= 96 for part in name.split("/")):
            raise HubError(f"{text!r} is no repository: write ORG/NAME or ORG/NAME@REVISION")
        return cls(name, revision or "main")

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit: its files never change."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """sha256: of the content, if the hub knows it; blob: git's name of the content."""

    path: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def digest(self) -> str:
        """The digest by which the content is verified, which is also its name in the cache."""
        return self.sha256 or self.blob or ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]


class HubApi:
    """A connection to a hub.

    endpoint: None means HF_ENDPOINT, or the public hub.
    token:    of a user; None sends no token.
    clock:    in seconds.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        headers = {"user-agent": "megatron-inference"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # httpx logs URLs. Those of large files are signed: they grant access to the file without a token.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        try:
            self._origin = _origin(httpx.URL(self._endpoint))
        except httpx.InvalidURL as error:
            raise HubError(f"the hub's endpoint {shown(self._endpoint)} is no URL: {error}") from error
        self._client = httpx.Client(
            headers=headers,
            timeout=_TIMEOUT,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            event_hooks={"request": [self._check_request]},
        )

    def close(self) -> None:
        self._client.close()

    def list(self, reference: Reference) -> Listing:
        """Return the files of `reference`. Raises HubError, HubUnavailableError."""
        revision = quote(reference.revision, safe="")
        url = f"{self._endpoint}/api/models/{reference.repository}/revision/{revision}?blobs=true"
        with self._answer(reference, url, _UNCOMPRESSED) as answer:
            body = self._whole(answer, reference)
        return parse_listing(body, reference, hub=self._endpoint)

    @contextmanager
    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[Iterator[bytes]]:
        """Yield the content of a file from byte `start` on. Raises HubError, HubUnavailableError, also while read.

        A server that ignores ranges sends the content from its beginning; the bytes before `start` are skipped.
        """
        url = f"{self._endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.path)}"
        headers = _UNCOMPRESSED | ({"range": f"bytes={start}-"} if start else {})
        with self._answer(Reference(listing.repository, listing.commit), url, headers) as answer:
            yield _skipping(answer.iter_raw(), 0 if answer.status_code == httpx.codes.PARTIAL_CONTENT else start)

    def _whole(self, answer: httpx.Response, reference: Reference) -> bytes:
        """Return a list of files as it was sent: a compressed one could be a thousand times as large."""
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise HubError(f"{self._endpoint} compresses its list of the files of {reference}, which was not asked for")
        body, until = bytearray(), self._clock() + LISTING_SECONDS
        for piece in answer.iter_raw():
            body += piece
            if len(body) > MAX_LISTING_BYTES:
                raise HubError(
                    f"{self._endpoint} lists the files of {reference} in more than {MAX_LISTING_BYTES} bytes: that is "
                    "no model"
                )
            if self._clock() > until:
                raise HubUnavailableError(
                    f"{self._endpoint} did not list the files of {reference} within {LISTING_SECONDS:g} s"
                )
        return bytes(body)

    def _check_request(self, request: httpx.Request) -> None:
        """Check every request, redirected ones included: only the hub gets the token."""
        if _origin(request.url) != self._origin:
            request.headers.pop("authorization", None)
        if self._origin[0] == "https" and request.url.scheme != "https":
            raise HubError(
                f"{self._endpoint} redirects to {shown(str(request.url.copy_with(query=None)))}, without encryption: "
                "nothing is fetched from there"
            )

    @contextmanager
    def _answer(self, reference: Reference, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", url, headers=headers) as answer:
                _require_success(answer, reference)
                yield answer
        except httpx.TransportError as error:
            raise HubUnavailableError(
                f"{self._endpoint} does not answer for {reference} ({type(error).__name__}: {error}): see that the "
                "network allows it, or name another hub in HF_ENDPOINT"
            ) from error
        except (httpx.RequestError, httpx.InvalidURL) as error:  # too many redirects, an invalid compressed body
            raise HubError(
                f"{self._endpoint} answers for {reference} what cannot be used ({type(error).__name__}: "
                f"{escaped(str(error))})"
            ) from error


def read_token(file: Path | None = None) -> str | None:
    """Return the token in `file`, in HF_TOKEN, or in the file that HF_TOKEN_PATH or HF_HOME names."""
    if file is None:
        token = os.environ.get("HF_TOKEN", "").strip()
        file = Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token")
        if token or not file.is_file():
            return token or None
    return file.read_text().strip() or None


def parse_listing(body: bytes, reference: Reference, *, hub: str) -> Listing:
    """Return the files that the answer `body` of `hub` lists. Raises HubError naming the hub, the field, its value."""

    def wrong(field: str, value: object, wanted: str) -> HubError:
        return HubError(
            f"{hub} answers for {reference} with {field} {shown(value)}: want {wanted}; nothing is fetched, name "
            "another hub or revision"
        )

    try:
        values = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise HubError(f"{hub} answers for {reference} what is no list of files: {escaped(str(error))}") from error
    values = values if isinstance(values, dict) else {}
    commit, siblings = values.get("sha"), values.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise wrong("sha", commit, "40 or 64 lowercase hexadecimal digits")
    if reference.commit not in (None, commit):
        raise wrong("sha", commit, f"the commit that was asked for, {reference.commit}")
    if not isinstance(siblings, list) or len(siblings) > MAX_FILES:
        raise wrong("siblings", siblings, f"a list of at most {MAX_FILES} files")
    return Listing(reference.repository, commit, tuple(_remote_file(entry, wrong) for entry in siblings))


def _remote_file(entry: Any, wrong: Callable[[str, object, str], HubError]) -> RemoteFile:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    try:
        path = require_safe_name(fields.get("rfilename"))
    except UnsafeNameError as error:
        raise wrong("rfilename", fields.get("rfilename"), f"a file name inside its directory ({error})") from error
    large = fields.get("lfs") or {}
    if not isinstance(large, dict):
        raise wrong(f"lfs of {shown(path)}", large, "an object")
    size = large.get("size", fields.get("size"))
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
        raise wrong(f"size of {shown(path)}", size, f"a whole number from 0 to {_MAX_SIZE}")
    sha256, blob = large.get("sha256"), fields.get("blobId")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise wrong(f"lfs.sha256 of {shown(path)}", sha256, "64 lowercase hexadecimal digits")
    if (blob is not None or sha256 is None) and not (isinstance(blob, str) and _COMMIT.fullmatch(blob)):
        raise wrong(f"blobId of {shown(path)}", blob, "40 or 64 lowercase hexadecimal digits")
    return RemoteFile(path, size, sha256, blob)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _require_success(answer: httpx.Response, reference: Reference) -> None:
    status = answer.status_code
    if status < 400:
        return
    said = escaped(answer.headers.get("x-error-message") or answer.reason_phrase)
    if status in (401, 403):
        raise HubError(
            f"the hub refuses {reference}: {status} {escaped(answer.reason_phrase)} ({said}); it is private or a gated "
            "repo, or does not exist: give a token that may read it (HF_TOKEN, --token-file or tokenSecretRef)"
        )
    if status == 404:
        raise HubError(
            f"repository not found: {reference} ({said}); correct the name or the revision, or give a token if it is "
            "private"
        )
    if status == 429 or status >= 500:
        after = answer.headers.get("retry-after", "")
        raise HubUnavailableError(
            f"the hub is overloaded: {status} {said} for {reference}",
            answered=True,
            retry_after=float(after) if after.isdecimal() else None,
        )
    raise HubError(f"the hub answers {status} {said} for {reference}")


def _skipping(pieces: Iterator[bytes], skip: int) -> Iterator[bytes]:
    for piece in pieces:
        if skip < len(piece):
            yield piece[skip:]
        skip = max(0, skip - len(piece))


# --- one file ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTransfer:
    """The transfer of one file.

    target, partial: in directories that exist.
    partial:  holds the bytes received so far; bytes of an earlier process are not transferred again.
    received: called with the number of bytes of each piece, earlier ones included; negative when they were wrong.
    wait:     sleeps for a number of seconds.
    clock:    in seconds.
    """

    api: HubApi
    listing: Listing
    file: RemoteFile
    target: Path
    partial: Path
    received: Callable[[int], None]
    wait: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def run(self) -> str:
        """Transfer the file and return its sha256. A file with the wrong content is transferred once more.

        Raises HubError, WrongContentError, and HubUnavailableError after the last attempt.
        """
        file, content = self.file, _Content(self.file)
        for kept in (True, False):
            self.received(content.read(self.partial) if kept else 0)
            self._append(content)
            if content.is_right:
                self.partial.replace(self.target)
                return content.sha256
            self.partial.unlink()
            self.received(-content.size)
            wrong, content = content, _Content(file)
            _log.warning("%s came with digest %s, it should be %s", file.path, wrong.digest, file.digest)
        raise WrongContentError(
            f"{file.path} of {self.listing.repository}@{self.listing.commit} came twice with digest {wrong.digest}, "
            f"the hub says {file.digest}: something between here and the hub changes it"
        )

    def _append(self, content: _Content) -> None:
        """Write to `partial` until it has the file's size. Writes are unbuffered, so a killed process loses nothing."""
        file, failures = self.file, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(self.partial, flags, 0o644), "ab", 0) as out:
            while content.size < file.size:
                before = content.size
                try:
                    self._receive(content, out)
                except HubUnavailableError as error:
                    gained = content.size - before
                    failures = 1 if gained >= min(_LEAST_BYTES, file.size - before) else failures + 1
                    if failures >= _ATTEMPTS:
                        raise HubUnavailableError(
                            f"{error}; {content.size} of {file.size} bytes of {file.path} are here: run this again to "
                            "go on"
                        ) from error
                    _pause(error, failures, self.wait)
            # The manifest vouches for the whole file, so the file must survive a power failure if the manifest does.
            os.fsync(out.fileno())

    def _receive(self, content: _Content, out: BinaryIO) -> None:
        """Write what one connection brings."""
        file, since, arrived = self.file, self.clock(), 0
        with self.api.open(self.listing, file, start=content.size) as pieces:
            for piece in pieces:
                out.write(piece)
                content.add(piece)
                self.received(len(piece))
                if content.size > file.size:
                    return
                arrived += len(piece)
                passed = self.clock() - since
                if passed >= _PACE_SECONDS:
                    if arrived < _LEAST_BYTES:
                        raise HubUnavailableError(f"{file.path} came at {arrived} bytes in {passed:.0f} s")
                    since, arrived = self.clock(), 0
        if content.size < file.size:
            raise HubUnavailableError(f"{file.path} ended after {content.size} of {file.size} bytes")


def check_file(file: RemoteFile, path: Path) -> str | None:
    """Return the sha256 of the file at `path` if its content is that of `file`, else None."""
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    content = _Content(file)
    content.read(path)
    return content.sha256 if content.is_right else None


class _Content:
    """The digests of what was received of a file: sha256 always, and git's if the hub knows no other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._git: Any = None
        if file.sha256 is None:
            # Git names contents by SHA-1, or by SHA-256 in repositories of that format.
            kind = "sha256" if len(file.digest) == 64 else "sha1"
            self._git = hashlib.new(kind, f"blob {file.size}\0".encode(), usedforsecurity=False)
        self.size = 0

    def add(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self.size += len(data)

    def read(self, path: Path) -> int:
        """Add the content of a file, if it exists; return its size."""
        if path.is_file():
            with path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    self.add(data)
        return self.size

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def digest(self) -> str:
        """The digest to compare with that of the hub's list."""
        return self.sha256 if self._git is None else str(self._git.hexdigest())

    @property
    def is_right(self) -> bool:
        return self.size == self._file.size and self.digest == self._file.digest


def patiently(ask: Callable[[], _Answer], *, wait: Callable[[float], object]) -> _Answer:
    """Return the result of `ask`, called again while the hub is overloaded. Raises what `ask` raises."""
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
