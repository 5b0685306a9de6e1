"""A fake of the Hugging Face hub on loopback that serves downloads of huggingface_hub, with fault injection.

It does not offer Xet, so the library transfers files over plain HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from threaded_server import serving

LARGE = (".safetensors", ".gguf", ".distcp", ".bin")
"""Files with these suffixes are LFS files, which the hub lists with sha256, and others with git's blob id."""


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Make this process and its children use the hub at `url` and the caches in `home`.

    huggingface_hub reads the environment variables when it is imported, so its constants are set as well.
    """
    from huggingface_hub import constants

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(home))
    values = {"ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    values |= {"HF_TOKEN_PATH": str(home / "token"), "HF_XET_CACHE": str(home / "xet")}
    values |= {"HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}"}
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)


@dataclass
class FakeHub:
    """files: content of the repository's files, by path.

    token:       required token; None allows requests without a token.
    cut_after:   bytes after which the connection of a file breaks, one entry per request; None sends the whole file.
    statuses:    (status, Retry-After) answered instead of a file, one entry per request.
    list_statuses: the same for the listing.
    delay_seconds: time in which each LFS file comes a byte at a time; then comes the rest.
    trickling:   paths of which each connection sends 64 KiB only.
    damaged:     number of requests, by path, whose content differs from the listing.
    ignores_range: send whole files for range requests.
    elsewhere:   address of another server, to which file requests are redirected.
    headers:     replace headers of the answers to HEAD.
    requests:    (path, range) of the requested files.
    tokens:      Authorization of all requests.
    listed:      number of requests for the listing.
    list_body:   replaces the listing.
    list_message: reason of an answer of list_statuses.
    """

    files: dict[str, bytes]
    repository: str = "org/name"
    commit: str = "c" * 40
    branch: str = "main"
    token: str | None = None
    cut_after: list[int | None] = field(default_factory=list)
    statuses: list[tuple[int, str]] = field(default_factory=list)
    damaged: dict[str, int] = field(default_factory=dict)
    ignores_range: bool = False
    elsewhere: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    list_statuses: list[tuple[int, str]] = field(default_factory=list)
    delay_seconds: float = 0.0
    trickling: set[str] = field(default_factory=set)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    listed: int = 0
    list_body: bytes | None = None
    list_message: str = "slow down"
    url: str = ""

    @classmethod
    def of(cls, directory: Path) -> FakeHub:
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        return cls({str(path.relative_to(directory)): path.read_bytes() for path in paths})

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(_Handler):
            owner = hub

        with serving(Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            yield self

    def listing(self) -> dict[str, object]:
        siblings = []
        for path, data in self.files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.repository, "sha": self.commit, "siblings": siblings}

    def tree(self) -> list[dict[str, object]]:
        """Return the listing as snapshot_download() asks for it."""
        found = []
        for path, data in self.files.items():
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            found.append(entry)
        return found

    def digest(self, path: str) -> str:
        """Return the ETag of a content, under which huggingface_hub stores it in its cache."""
        data = self.files[path]
        return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else blob_id(data)


def blob_id(data: bytes) -> str:
    """Return the SHA-1 that git gives to a file with this content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.owner, urlsplit(self.path).path
        given = self.headers.get("authorization")
        hub.tokens.append(given)
        if path.startswith("/api/models/"):
            hub.listed += 1
        files = f"/{hub.repository}/resolve/{hub.commit}/"
        if hub.token is not None and given != f"Bearer {hub.token}":
            self._reject(401 if given is None else 403, "Access to model org/name is restricted", code="GatedRepo")
        elif path.startswith("/api/models/"):
            self._list(path)
        elif not path.startswith(files):
            self._reject(404, "Repository not found", code="RepoNotFound")
        elif unquote(path.removeprefix(files)) not in hub.files:
            self._reject(404, "Entry not found", code="EntryNotFound")
        elif self.command == "HEAD":
            self._describe_file(unquote(path.removeprefix(files)))
        else:
            self._send_file(unquote(path.removeprefix(files)))

    def _list(self, path: str) -> None:
        hub = self.owner
        if hub.list_statuses:
            status, after = hub.list_statuses.pop(0)
            self._reject(status, hub.list_message, after)
            return
        wanted = [f"/api/models/{hub.repository}/revision/{name}" for name in (hub.branch, hub.commit)]
        if path == f"/api/models/{hub.repository}/tree/{hub.commit}":
            self._send_json(json.dumps(hub.tree()).encode())
            return
        if path not in wanted:
            code = "RevisionNotFound" if path.startswith(f"/api/models/{hub.repository}/") else "RepoNotFound"
            self._reject(404, "Repository Not Found", code=code)
            return
        self._send_json(json.dumps(hub.listing()).encode() if hub.list_body is None else hub.list_body)

    def _send_json(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _describe_file(self, name: str) -> None:
        """Answer HEAD: the commit, the digest as ETag, the size, and where the content is."""
        hub = self.owner
        headers = {"x-repo-commit": hub.commit, "etag": f'"{blob_id(hub.files[name])}"'}
        if name.endswith(LARGE):
            headers["x-linked-etag"] = f'"{hub.digest(name)}"'
            headers["x-linked-size"] = str(len(hub.files[name]))
        self.send_response(200 if hub.elsewhere is None else 302)
        if hub.elsewhere is not None:
            headers["location"] = f"{hub.elsewhere}{self.path}"
        for key, value in {**headers, "content-length": str(len(hub.files[name])), **hub.headers}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send_file(self, name: str) -> None:
        hub = self.owner
        wanted = self.headers.get("range")
        hub.requests.append((name, wanted))
        if hub.statuses:
            status, after = hub.statuses.pop(0)
            self._reject(status, "slow down", after)
            return
        if hub.elsewhere is not None:
            self.send_response(302)
            self.send_header("location", f"{hub.elsewhere}{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        data = hub.files[name]
        if hub.damaged.get(name, 0) > 0:
            hub.damaged[name] -= 1
            data = bytes(reversed(data))
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted) if wanted and not hub.ignores_range else None
        start = int(found[1]) if found else 0
        end = min(int(found[2]) + 1, len(data)) if found and found[2] else len(data)
        self.send_response(206 if found else 200)
        self.send_header("content-length", str(end - start))
        if found:
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        cut = hub.cut_after.pop(0) if hub.cut_after else 1 << 16 if name in hub.trickling else None
        fast = time.monotonic() + (hub.delay_seconds if name.endswith(LARGE) else 0.0)
        with contextlib.suppress(ConnectionError):  # the client may close the connection
            while time.monotonic() < fast:
                self.wfile.write(data[start : start + 1])
                start += 1
                time.sleep(0.2)
            self.wfile.write(data[start : end if cut is None else min(end, start + cut)])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _reject(self, status: int, message: str, after: str = "", *, code: str = "") -> None:
        self.send_response(status)
        self.send_header("x-error-message", message)
        if code:
            self.send_header("x-error-code", code)
        if after:
            self.send_header("retry-after", after)
        self.send_header("content-length", "0")
        self.end_headers()
