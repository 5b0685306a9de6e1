"""The part of the hub's HTTP API that a download needs: which files a revision has, and how to get one.

Nothing that a hub says is believed before it is checked: names of commits and files become paths, sizes become what is
written, and answers and redirects have limits.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from megatron_runtime.checkpoints.model_files import UnsafeNameError, require_safe_name
from megatron_runtime.checkpoints.source import HUB_PREFIX
from megatron_runtime.protocol.text import escaped, shown

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_LISTING_BYTES = 64 << 20
MAX_FILES = 100_000
"""Of a repository."""
LISTING_SECONDS = 120.0
"""For the whole list of files, however slowly it comes."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SIZE = 1 << 50
_MAX_REDIRECTS = 8
_TIMEOUT = httpx.Timeout(30, connect=10)


class HubError(ValueError):
    """The hub does not give what was asked for, and asking again does not help. The message says what to do."""


class HubUnavailableError(OSError):
    """The hub cannot be reached or is overloaded; asking again may help.

    answered:    it was reached.
    retry_after: seconds, where it said so.
    """

    def __init__(self, message: str, *, answered: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.answered = answered
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Reference:
    """A revision of a repository: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """`ORG/NAME[@REVISION]`, with or without `hf:` before it. Raises HubError."""
        name, _, revision = text.removeprefix(HUB_PREFIX).removeprefix("//").partition("@")
        if not _REPOSITORY.fullmatch(name) or ".." in name or not all(len(part) <= 96 for part in name.split("/")):
            raise HubError(f"{text!r} is no repository: write ORG/NAME or ORG/NAME@REVISION")
        return cls(name, revision or "main")

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit: its files never change."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """sha256: of the content, where the hub knows it; blob: git's name of the content otherwise."""

    path: str
    size: int
    sha256: str | None
    blob: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]


class HubApi:
    """endpoint: None means HF_ENDPOINT, or the public hub. token: of a user; None asks without one.

    clock: in seconds.
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
        # It logs addresses, and those of large files are signed: whoever has one may read the file.
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
        """Raises HubError, HubUnavailableError."""
        revision = quote(reference.revision, safe="")
        url = f"{self._endpoint}/api/models/{reference.repository}/revision/{revision}?blobs=true"
        headers = {"accept-encoding": "identity"}
        with self._translated(reference), self._client.stream("GET", url, headers=headers) as answer:
            _require_success(answer, reference)
            body = self._whole(answer, reference)
        return parse_listing(body, reference, hub=self._endpoint)

    @contextmanager
    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[Iterator[bytes]]:
        """The content of a file from byte `start` on. Raises HubError, HubUnavailableError, here and while it is read.

        A server that knows no ranges gives the content from its beginning; what lies before `start` is left out.
        """
        reference = Reference(listing.repository, listing.commit)
        url = f"{self._endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.path)}"
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
        with self._translated(reference), self._client.stream("GET", url, headers=headers) as answer:
            _require_success(answer, reference)
            skip = start if start and answer.status_code != httpx.codes.PARTIAL_CONTENT else 0
            yield _skipping(answer.iter_raw(), skip)

    def _whole(self, answer: httpx.Response, reference: Reference) -> bytes:
        """A list of files, as it was sent: what is compressed could be a thousand times as large."""
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
        """Of every request, also those that redirects lead to: the token is for the hub alone."""
        if _origin(request.url) != self._origin:
            request.headers.pop("authorization", None)
        if self._origin[0] == "https" and request.url.scheme != "https":
            raise HubError(
                f"{self._endpoint} redirects to {shown(str(request.url.copy_with(query=None)))}, without encryption: "
                "nothing is fetched from there"
            )

    @contextmanager
    def _translated(self, reference: Reference) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise HubUnavailableError(
                f"{self._endpoint} does not answer for {reference} ({type(error).__name__}: {error}): see that the "
                "network allows it, or name another hub in HF_ENDPOINT"
            ) from error
        except (httpx.RequestError, httpx.InvalidURL) as error:  # too many redirects, a compressed body that is none
            raise HubError(
                f"{self._endpoint} answers for {reference} what cannot be used ({type(error).__name__}: "
                f"{escaped(str(error))})"
            ) from error


def read_token(file: Path | None = None) -> str | None:
    """The token in `file`, in HF_TOKEN, or in the file that HF_TOKEN_PATH or HF_HOME points to."""
    if file is not None:
        return file.read_text().strip() or None
    token = os.environ.get("HF_TOKEN", "").strip()
    if token:
        return token
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or Path(home, "token"))
    return (path.read_text().strip() or None) if path.is_file() else None


def parse_listing(body: bytes, reference: Reference, *, hub: str) -> Listing:
    """The files that the answer `body` of `hub` lists. Raises HubError naming the hub, the field and its value."""

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
