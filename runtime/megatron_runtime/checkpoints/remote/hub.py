"""The hub's HTTP API as far as a download needs it: list the files of a revision, and read one of them.

Nothing that a hub sends is used before it is checked: names of commits and files become paths, sizes limit what is
written, digests identify contents, and responses and redirects have limits.
"""

from __future__ import annotations

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
from megatron_runtime.checkpoints.remote import HUB_PREFIX, hf_home
from megatron_runtime.process.environment import http_client
from megatron_runtime.process.secrets import HEADER, URL, Form, SecretError
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import escaped, shown

_log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_LISTING_BYTES, MAX_FILES = 64 << 20, 100_000
"""Limits of the list of files of a repository."""
LISTING_SECONDS = 120.0
"""Time limit for the whole list of files."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FILE_BYTES = 1 << 50
_MAX_REDIRECTS = 8
_TIMEOUT = httpx.Timeout(30, connect=10)
_UNCOMPRESSED = {"accept-encoding": "identity"}

MAX_ATTEMPTS = 6
"""Consecutive attempts without progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def is_commit(name: str) -> bool:
    """Return whether a revision names a commit: 40 or 64 lowercase hexadecimal digits."""
    return bool(_COMMIT.fullmatch(name))


class HubError(ValueError):
    """The hub does not provide what was requested, and a retry does not help. The message names the remedy."""


class HubUnavailableError(OSError):
    """The hub cannot be reached or is overloaded; a retry may help.

    retry_after: seconds that an overloaded hub names, 0 if it names none; None if no hub answers.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
            raise HubError(f"{text!r} is not a repository: write ORG/NAME or ORG/NAME@REVISION")
        return cls(name, revision or "main")

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit: its files never change."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """sha256: of the content, if the source knows it; blob: git's name of the content; version: of an object in a
    store, which changes with the content but is no digest of it."""

    path: str
    size: int
    sha256: str | None
    blob: str | None
    version: str = ""

    @property
    def digest(self) -> str:
        """The digest by which the content is verified, else its version: the name of the content in the cache."""
        return self.sha256 or self.blob or self.version


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
    clock:    in seconds; limits slow responses.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        headers = {"user-agent": "megatron-inference"}
        if token:
            headers["authorization"] = f"Bearer {_valid(HEADER, 'the token of the hub (HF_TOKEN, or its file)', token)}"
        # httpx logs URLs. Those of large files are signed: they grant access to the file without a token.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        try:
            self._origin = _origin(httpx.URL(_valid(URL, "the endpoint of the hub (HF_ENDPOINT)", self._endpoint)))
        except (httpx.InvalidURL, HubError):
            raise HubError(f"the endpoint of the hub (HF_ENDPOINT) is not a URL: give {URL.want}") from None
        self._client = http_client(
            httpx.Client,
            self._endpoint,
            headers=headers,
            timeout=_TIMEOUT,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            event_hooks={"request": [self._check_request]},
        )

    def close(self) -> None:
        self._client.close()

    def list(self, reference: Reference, *, wait: Callable[[float], object] = time.sleep) -> Listing:
        """Return the files of `reference`; retry while the hub is overloaded. Raises HubError, HubUnavailableError.

        wait: sleeps for a number of seconds.
        """
        revision = quote(reference.revision, safe="")
        url = f"{self._endpoint}/api/models/{reference.repository}/revision/{revision}?blobs=true"

        def read() -> Listing:
            with self._response(reference, url, _UNCOMPRESSED) as response:
                return parse_listing(self._read_listing(response, reference), reference, hub=self._endpoint)

        return retried(read, wait)

    @contextmanager
    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[Iterator[bytes]]:
        """Yield the content of a file from byte `start` on. Raises HubError, HubUnavailableError, also while read.

        A server that ignores ranges sends the content from its beginning; the bytes before `start` are skipped.
        """
        url = f"{self._endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.path)}"
        headers = _UNCOMPRESSED | ({"range": f"bytes={start}-"} if start else {})
        with self._response(Reference(listing.repository, listing.commit), url, headers) as response:
            yield _skipping(response.iter_raw(), 0 if response.status_code == httpx.codes.PARTIAL_CONTENT else start)

    def _read_listing(self, response: httpx.Response, reference: Reference) -> bytes:
        """Return a list of files as it was sent: a compressed one could be a thousand times as large."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubError(f"{self._endpoint} compresses its list of the files of {reference}, against the request")
        body, until = bytearray(), self.clock() + LISTING_SECONDS
        for piece in response.iter_raw():
            body += piece
            if len(body) > MAX_LISTING_BYTES:
                raise HubError(
                    f"{self._endpoint} lists the files of {reference} in more than {MAX_LISTING_BYTES} bytes: this "
                    "is not a model"
                )
            if self.clock() > until:
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
    def _response(self, reference: Reference, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                _require_success(response, reference)
                yield response
        except httpx.TransportError as error:
            raise HubUnavailableError(
                f"{self._endpoint} does not answer for {reference} ({type(error).__name__}: {error}): check that the "
                "network allows it, or name another hub in HF_ENDPOINT"
            ) from error
        except (httpx.RequestError, httpx.InvalidURL) as error:  # too many redirects, an invalid compressed body
            raise HubError(
                f"{self._endpoint} sends an unusable response for {reference} ({type(error).__name__}: "
                f"{escaped(str(error))})"
            ) from error


def _valid(form: Form, name: str, value: str) -> str:
    try:
        return form.check(name, value)
    except SecretError as error:
        raise HubError(str(error)) from None


def read_token(file: Path | None = None) -> str | None:
    """Return the token in `file`, in HF_TOKEN, or in the file that HF_TOKEN_PATH or HF_HOME names."""
    if file is None:
        token = os.environ.get("HF_TOKEN", "").strip()
        file = Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token")
        if token or not file.is_file():
            return token or None
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except UnicodeDecodeError:
        raise HubError(f"{file} is not a text file: write the token there, as the hub shows it") from None


def parse_listing(body: bytes, reference: Reference, *, hub: str) -> Listing:
    """Return the files in the response `body` of `hub`. Raises HubError naming the hub, the field and its value."""

    def wrong(field: str, value: object, wanted: str) -> HubError:
        return HubError(
            f"{hub} answers for {reference} with {field} {shown(value)}: want {wanted}; nothing is fetched, name "
            "another hub or revision"
        )

    try:
        values = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise HubError(f"{hub} answers for {reference} with an invalid list of files: {escaped(str(error))}") from error
    values = values if isinstance(values, dict) else {}
    commit, siblings = values.get("sha"), values.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise wrong("sha", commit, "40 or 64 lowercase hexadecimal digits")
    if reference.commit not in (None, commit):
        raise wrong("sha", commit, f"the requested commit, {reference.commit}")
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
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise wrong(f"size of {shown(path)}", size, f"a whole number from 0 to {MAX_FILE_BYTES}")
    sha256, blob = large.get("sha256"), fields.get("blobId")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise wrong(f"lfs.sha256 of {shown(path)}", sha256, "64 lowercase hexadecimal digits")
    if (blob is not None or sha256 is None) and not (isinstance(blob, str) and _COMMIT.fullmatch(blob)):
        raise wrong(f"blobId of {shown(path)}", blob, "40 or 64 lowercase hexadecimal digits")
    return RemoteFile(path, size, sha256, blob)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _require_success(response: httpx.Response, reference: Reference) -> None:
    status = response.status_code
    if status < 400:
        return
    reason = escaped(response.headers.get("x-error-message") or response.reason_phrase)
    if status in (401, 403):
        raise HubError(
            f"the hub rejects {reference}: {status} {escaped(response.reason_phrase)} ({reason}); it is private or a "
            "gated repo, or does not exist: give a token that may read it (HF_TOKEN, --token-file or tokenSecretRef)"
        )
    if status == 404:
        raise HubError(
            f"repository not found: {reference} ({reason}); correct the name or the revision, or give a token if it "
            "is private"
        )
    if status == 429 or status >= 500:
        after = response.headers.get("retry-after", "")
        raise HubUnavailableError(
            f"the hub is overloaded: {status} {reason} for {reference}",
            retry_after=float(after) if after.isdecimal() else 0.0,
        )
    raise HubError(f"the hub answers {status} {reason} for {reference}")


def _skipping(pieces: Iterator[bytes], skip: int) -> Iterator[bytes]:
    for piece in pieces:
        if skip < len(piece):
            yield piece[skip:]
        skip = max(0, skip - len(piece))


def retried(read: Callable[[], Listing], wait: Callable[[float], object]) -> Listing:
    """Return what `read` returns; call it again while the hub is overloaded. Raises its errors.

    wait: sleeps for a number of seconds.
    """
    failures = 0
    while True:
        try:
            return read()
        except HubUnavailableError as error:
            failures += 1
            if error.retry_after is None or failures == MAX_ATTEMPTS:
                raise
            pause(error, failures, wait)


def pause(error: HubUnavailableError, failures: int, wait: Callable[[float], object]) -> None:
    """Wait before a retry: as long as the hub names, else twice as long after each failure."""
    seconds = min(_LONGEST_PAUSE, error.retry_after or _FIRST_PAUSE * 2 ** (failures - 1))
    _log.warning("%s; retrying in %.0f s", error, seconds)
    wait(seconds)
