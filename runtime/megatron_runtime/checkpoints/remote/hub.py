"""A client of a Hugging Face hub. It lists the files of a revision, and reads or fetches a file.

It uses huggingface_hub, which reads its environment variables (HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE,
proxies, ...) when it is imported. The hub is trusted like a package index. Nevertheless, this module checks names that
become paths, and values from users that error messages quote.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url, set_client_factory, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff, tqdm
from huggingface_hub.utils import logging as library_logging
from huggingface_hub.utils._http import hf_request_event_hook
from huggingface_hub.utils._xet import abort_xet_session

from megatron_runtime.checkpoints.model_files import UnsafeNameError, require_safe_name
from megatron_runtime.checkpoints.remote import HUB_PREFIX
from megatron_runtime.checkpoints.remote.files import (
    HubError,
    HubUnavailableError,
    Listing,
    RemoteFile,
    is_commit,
    retried,
)
from megatron_runtime.process.environment import UnusableProxyError, http_client
from megatron_runtime.process.secrets import HEADER, URL
from megatron_runtime.protocol.text import escaped, shown

_PROGRAM = "megatron-inference"
"""Prefix of the User-Agent in this module's requests.

It distinguishes these requests from other requests that the program sends through the library.
"""
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LISTING_SECONDS = 30.0
"""Timeout, in seconds, of each read of the list of files."""
_PATH_HEADERS = ("etag", constants.HUGGINGFACE_HEADER_X_LINKED_ETAG, constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
"""Headers of a HEAD response from which the library derives names of files and directories."""
_PATH_NAME = re.compile(r'(W/)?"?[A-Za-z0-9][A-Za-z0-9._+=:-]*"?')
_QUERY = re.compile(r"[?]\S+")
_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, httpx2.HTTPError)
"""Exceptions that the library raises for errors of the hub, and for responses from servers that are not a hub."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a revision of a repository on a hub. The revision is a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the reference in `ORG/NAME[@REVISION]`, with or without the prefix `hf:`. Raises HubError."""
        name, _, revision = text.removeprefix(HUB_PREFIX).removeprefix("//").partition("@")
        if not _REPOSITORY.fullmatch(name) or ".." in name or not all(len(part) <= 96 for part in name.split("/")):
            raise HubError(f"{text!r} is not a repository: write ORG/NAME or ORG/NAME@REVISION")
        return cls(name, revision or "main")

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit, whose files never change; None if it is a branch or a tag."""
        return self.revision if is_commit(self.revision) else None

    @property
    def cache_name(self) -> str:
        """Name of the repository's directory in a cache."""
        return f"models--{self.repository.replace('/', '--')}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


def offline_directory(reference: Reference, cache: Path) -> Path | None:
    """Return the cached directory of a revision if HF_HUB_OFFLINE is set, otherwise None.

    The files in this directory are not verified. Another program may have fetched them.

    Raises HubError if HF_HUB_OFFLINE is set and the revision is not cached.
    """
    if not constants.is_offline_mode():
        return None
    try:
        snapshot = snapshot_download(
            reference.repository, revision=reference.revision, cache_dir=cache, local_files_only=True
        )
    except LocalEntryNotFoundError:
        raise HubError(
            f"HF_HUB_OFFLINE is set, and {cache} does not have all files of {reference}: fetch it with `megatron "
            "fetch` where the hub can be reached, or unset HF_HUB_OFFLINE"
        ) from None
    return Path(snapshot)


class HubApi:
    """A client of a hub, for the repository that a reference names.

    endpoint:   URL of the hub; None means the variable HF_ENDPOINT, or the public hub if this variable is not set.
    token_file: file with the access token; None lets huggingface_hub look for a token.

    Raises HubError, or SecretError if the endpoint or the token is malformed.
    """

    def __init__(self, reference: Reference, *, endpoint: str | None = None, token_file: Path | None = None) -> None:
        self._reference = reference
        self._endpoint = URL.check(
            "the endpoint of the hub (HF_ENDPOINT)", (endpoint or constants.ENDPOINT).rstrip("/")
        )
        try:
            token = token_file.read_text(encoding="utf-8").strip() if token_file else None
            sent = token or os.environ.get("HF_TOKEN", "").strip() or get_token()
        except UnicodeDecodeError:
            file = token_file or constants.HF_TOKEN_PATH
            raise HubError(f"{file} is not a text file: write the token there, as the hub shows it") from None
        if sent:
            HEADER.check("the token of the hub (HF_TOKEN, or its file)", sent)
        _configure_library(self._endpoint)
        self._api = HfApi(endpoint=self._endpoint, token=token, library_name=_PROGRAM)

    def list(self, *, wait: Callable[[float], object] = time.sleep) -> Listing:
        """Return the files of the revision. Retries while the hub is overloaded.

        wait: sleeps for a number of seconds.

        Raises HubError or HubUnavailableError.
        """
        return retried(self._list, wait)

    def read(self, listing: Listing, file: RemoteFile, size: int) -> Iterator[bytes]:
        """Yield the first `size` bytes of a file, or the whole file if the hub ignores ranges.

        Raises HubError or HubUnavailableError.
        """
        url = hf_hub_url(listing.repository, file.path, revision=listing.commit, endpoint=self._endpoint)
        headers = build_hf_headers(token=self._api.token, library_name=_PROGRAM)
        headers |= {"accept-encoding": "identity", "range": f"bytes=0-{size - 1}"}
        options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        with self._errors(), http_stream_backoff("GET", url, retry_on_exceptions=(), **options) as response:
            hf_raise_for_status(response)
            yield from response.iter_bytes()

    def get(
        self, listing: Listing, file: RemoteFile, cache: Path, received: Callable[[int], None], *, again: bool
    ) -> Path:
        """Return the path of a file in `cache`, and fetch the file if it is not cached. The content is not verified.

        received: called with the number of bytes received so far. If this call raises an error, the transfer is
                  cancelled.
        again:    whether to fetch the file even if it is cached.

        Raises HubError, HubUnavailableError or OSError.
        """
        received(0)
        with self._errors():
            downloaded = self._api.hf_hub_download(
                listing.repository,
                file.path,
                revision=listing.commit,
                cache_dir=cache,
                force_download=again,
                tqdm_class=_bar(received),
            )
        path = cache.resolve() / self._reference.cache_name / "snapshots" / listing.commit / file.path
        if Path(downloaded) != path:
            raise HubError(f"{self._endpoint} sent {file.path} of another commit than {listing.commit}")
        return path

    def cancel(self) -> None:
        """Cancel the running transfers. A transfer over HTTP without Xet stops when it next calls `received`."""
        abort_xet_session()

    def _list(self) -> Listing:
        reference = self._reference
        with self._errors():
            info = self._api.model_info(
                reference.repository, revision=reference.revision, files_metadata=True, timeout=_LISTING_SECONDS
            )
            if not is_commit(info.sha) or reference.commit not in (None, info.sha):
                raise HubError(
                    f"{self._endpoint} answers for {reference} with sha {shown(info.sha)}: want a commit, and the one "
                    "that was requested; name another hub or revision"
                )
            return Listing(reference.repository, str(info.sha), tuple(map(self._file, info.siblings or ())))

    def _file(self, entry: RepoSibling) -> RemoteFile:
        size, sha256 = (entry.size, None) if entry.lfs is None else (entry.lfs.size, entry.lfs.sha256)
        try:
            path = require_safe_name(entry.rfilename)
        except UnsafeNameError as error:
            raise HubError(
                f"{self._endpoint} lists a file of {self._reference} that is not fetched: {error}"
            ) from error
        if not is_commit(sha256 or entry.blob_id) or not isinstance(size, int) or size < 0:
            raise HubError(
                f"{self._endpoint} lists {shown(path)} of {self._reference} without a size and a digest: name another "
                "hub or revision"
            )
        return RemoteFile(path, size, sha256, entry.blob_id)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (HubError, HubUnavailableError, UnusableProxyError):
            raise
        except _ERRORS as error:
            # The messages of the library quote URLs, which may have signatures.
            raise self._translated(error) from None

    def _translated(self, error: BaseException) -> BaseException:
        """Return this package's error for an error of huggingface_hub, which can wrap an HTTP error.

        The message has one line.
        """
        text = escaped(_QUERY.sub("", str(error)))
        what = f"for {self._reference} ({type(error).__name__}: {text})"
        cause = error.__cause__
        if isinstance(error, LocalEntryNotFoundError | ValueError) and isinstance(cause, OSError | httpx2.HTTPError):
            return self._translated(cause)
        if isinstance(error, OfflineModeIsEnabled):
            return HubError(f"HF_HUB_OFFLINE is set: unset it to fetch {self._reference}")
        if isinstance(error, HfHubHTTPError):
            return self._rejected(error)
        if isinstance(error, httpx2.TransportError):
            return HubUnavailableError(
                f"{self._endpoint} does not answer {what}: check that the network allows it, or name another hub in "
                "HF_ENDPOINT"
            )
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return OSError(f"no space left on device to fetch {self._reference}: free some, or name another directory")
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if isinstance(error, OSError | RuntimeError):  # for example a wrong size, or an error of Xet
            return HubUnavailableError(f"{self._endpoint} did not send a whole file {what}: run this again")
        return HubError(f"{self._endpoint} sends an unusable response {what}: name another hub in HF_ENDPOINT")

    def _rejected(self, error: HfHubHTTPError) -> Exception:
        reference, response = self._reference, error.response
        status, phrase = response.status_code, escaped(response.reason_phrase)
        reason = escaped(error.server_message or response.reason_phrase)
        if status in (401, 403):
            return HubError(
                f"the hub rejects {reference}: {status} {phrase} ({reason}); it is private or a gated repo, or does "
                "not exist: give a token that may read it (HF_TOKEN, --token-file or tokenSecretRef)"
            )
        if status == 404:
            return HubError(
                f"repository not found: {reference} ({reason}); correct the name or the revision, or give a token if "
                "it is private"
            )
        if status == 429 or status >= 500:
            after = response.headers.get("retry-after", "")
            return HubUnavailableError(
                f"the hub is overloaded: {status} {reason} for {reference}",
                retry_after=float(after) if after.isdecimal() else 0.0,
            )
        return HubError(f"the hub answers {status} {reason} for {reference}")


_configured = ""
"""The endpoint for which the library's HTTP client is configured."""


def _configure_library(endpoint: str) -> None:
    """Configure the HTTP client of huggingface_hub.

    The client sends the token only to the hub, checks path names, and uses no proxy for loopback addresses.
    """
    global _configured
    if endpoint == _configured:
        return
    # Both libraries log signed URLs of large files, which grant access to a file without a token.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if not os.environ.get("HF_HUB_VERBOSITY"):
        library_logging.set_verbosity_error()
    # With telemetry, the library requests a list of programs from HF_ENDPOINT, even if another endpoint is set. It
    # blocks if HF_ENDPOINT does not respond.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    keep_token = partial(_keep_token, _origin(httpx2.URL(endpoint)))
    hooks = {"request": [hf_request_event_hook, keep_token], "response": [_require_path_names]}
    options = {"event_hooks": hooks, "follow_redirects": True, "timeout": None}
    set_client_factory(partial(http_client, httpx2.Client, endpoint, **options))
    _configured = endpoint


def _is_own(request: httpx2.Request) -> bool:
    return bool(request.headers.get("user-agent", "").startswith(_PROGRAM))


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _keep_token(origin: tuple[str, str, int | None], request: httpx2.Request) -> None:
    """Remove the token from requests to hosts other than the hub.

    For example, the service for Xet tokens can be on another host.
    """
    if _is_own(request) and _origin(request.url) != origin:
        request.headers.pop("authorization", None)


def _require_path_names(response: httpx2.Response) -> None:
    """Raise HubError if the headers of a response would make the library write a path outside of the cache."""
    for name in _PATH_HEADERS if _is_own(response.request) and response.request.method == "HEAD" else ():
        value = response.headers.get(name)
        if value is not None and not _PATH_NAME.fullmatch(value):
            raise HubError(
                f"{response.url.host} answers with {name} {shown(value)}: want a name without '/'; nothing is written, "
                "name another hub"
            )


def _bar(received: Callable[[int], None]) -> type[tqdm]:
    """Return a class of invisible progress bars, which call `received` with the number of bytes so far."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})
            self.count = 0

        def update(self, n: float | None = 1) -> None:
            self.count += int(n or 0)
            received(self.count)

        # If the class has these methods, the library reports the bytes of a file in one progress bar instead of two.
        def update_transfer(self, n: float | None = 1) -> None: ...
        def set_transfer_postfix_str(self, postfix: str, refresh: bool = False) -> None: ...

    return Bar
