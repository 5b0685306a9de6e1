"""The part of the hub's HTTP API that a download needs: which files a revision has, and how to get one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from megatron_runtime.loading.source import HUB_PREFIX

DEFAULT_ENDPOINT = "https://huggingface.co"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
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
        if not _REPOSITORY.fullmatch(name) or ".." in name:
            raise HubError(f"{text!r} is no repository: write ORG/NAME or ORG/NAME@REVISION")
        return cls(name, revision or "main")

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
    """endpoint: None means HF_ENDPOINT, or the public hub. token: of a user; None asks as anybody."""

    def __init__(self, *, endpoint: str | None = None, token: str | None = None) -> None:
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        headers = {"user-agent": "megatron-inference"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # It logs addresses, and those of large files are signed: whoever has one may read the file.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        # The client leaves the token out where a redirect leads to another host.
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)

    def close(self) -> None:
        self._client.close()

    def list(self, reference: Reference) -> Listing:
        """Raises HubError, HubUnavailableError."""
        revision = quote(reference.revision, safe="")
        url = f"{self._endpoint}/api/models/{reference.repository}/revision/{revision}?blobs=true"
        with self._translated(reference):
            answer = self._client.get(url)
            _require_success(answer, reference)
        try:
            values = answer.json()
            files = tuple(_remote_file(entry, reference) for entry in values["siblings"])
            return Listing(reference.repository, str(values["sha"]), files)
        except (ValueError, KeyError, TypeError) as error:
            raise HubError(f"{self._endpoint} answers for {reference} what is no list of files: {error!r}") from error

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

    @contextmanager
    def _translated(self, reference: Reference) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise HubUnavailableError(
                f"{self._endpoint} does not answer for {reference} ({type(error).__name__}: {error}): see that the "
                "network allows it, or name another hub in HF_ENDPOINT"
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


def _remote_file(entry: Any, reference: Reference) -> RemoteFile:
    path = PurePosixPath(entry["rfilename"])
    if path.is_absolute() or ".." in path.parts:
        raise HubError(f"{reference} lists a file {str(path)!r}, outside of its directory: nothing is fetched")
    large = entry.get("lfs") or {}
    size = large.get("size", entry.get("size"))
    return RemoteFile(str(path), int(size), large.get("sha256"), entry.get("blobId"))


def _require_success(answer: httpx.Response, reference: Reference) -> None:
    status = answer.status_code
    if status < 400:
        return
    said = answer.headers.get("x-error-message") or answer.reason_phrase
    if status in (401, 403):
        raise HubError(
            f"the hub refuses {reference}: {status} {answer.reason_phrase} ({said}); it is private or a gated repo, or "
            "does not exist: give a token that may read it (HF_TOKEN, --token-file or tokenSecretRef)"
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
