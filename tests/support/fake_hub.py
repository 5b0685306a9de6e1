"""A fake of the Hugging Face hub on loopback: the part of its HTTP API that a download uses, with fault injection."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".distcp", ".bin")
"""Files with these suffixes are LFS files, which the hub lists with sha256, and others with git's blob id."""


@dataclass
class FakeHub:
    """files: content of the repository's files, by path.

    token:       required token; None allows requests without a token.
    cut_after:   bytes after which the connection of a file breaks, one entry per request; None sends the whole file.
    statuses:    (status, Retry-After) answered instead of a file, one entry per request.
    list_statuses: the same for the listing.
    delay_seconds: time before the content of each LFS file.
    trickling:   paths of which each connection sends 64 KiB only.
    endless:     paths whose content continues after the listed size.
    damaged:     number of requests, by path, whose content differs from the listing.
    ignores_range: send whole files for range requests.
    elsewhere:   address of another server, to which file requests are redirected.
    requests:    (path, range) of the requested files.
    listed:      number of requests for the listing.
    list_body:   replaces the listing.
    list_headers: further headers of the listing.
    list_forever: send the listing without an end.
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
    list_statuses: list[tuple[int, str]] = field(default_factory=list)
    delay_seconds: float = 0.0
    trickling: set[str] = field(default_factory=set)
    endless: set[str] = field(default_factory=set)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    listed: int = 0
    list_body: bytes | None = None
    list_headers: dict[str, str] = field(default_factory=dict)
    list_forever: bool = False
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

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def listing(self) -> dict[str, object]:
        siblings = []
        for path, data in self.files.items():
            blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": blob}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.repository, "sha": self.commit, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        hub, path = self.owner, urlsplit(self.path).path
        given = self.headers.get("authorization")
        hub.tokens.append(given)
        if path.startswith("/api/models/"):
            hub.listed += 1
        if hub.token is not None and given != f"Bearer {hub.token}":
            self._reject(401 if given is None else 403, "Access to model org/name is restricted")
        elif path.startswith("/api/models/"):
            self._list(path)
        elif path.startswith(f"/{hub.repository}/resolve/{hub.commit}/"):
            self._send_file(unquote(path.removeprefix(f"/{hub.repository}/resolve/{hub.commit}/")))
        else:
            self._reject(404, "Entry not found")

    def _list(self, path: str) -> None:
        hub = self.owner
        if hub.list_statuses:
            status, after = hub.list_statuses.pop(0)
            self._reject(status, "slow down", after)
            return
        wanted = [f"/api/models/{hub.repository}/revision/{name}" for name in (hub.branch, hub.commit)]
        if path not in wanted:
            self._reject(404, "Repository Not Found")
            return
        body = json.dumps(hub.listing()).encode() if hub.list_body is None else hub.list_body
        self.send_response(200)
        for name, value in hub.list_headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(1 << 60 if hub.list_forever else len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)
            while hub.list_forever:
                self.wfile.write(bytes(1 << 20))
        self.close_connection = hub.list_forever

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
        time.sleep(hub.delay_seconds if name.endswith(LARGE) else 0.0)
        data = hub.files[name]
        if hub.damaged.get(name, 0) > 0:
            hub.damaged[name] -= 1
            data = bytes(reversed(data))
        data += bytes(50_000_000) if name in hub.endless else b""
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and not hub.ignores_range else 0
        self.send_response(206 if start else 200)
        self.send_header("content-length", str(len(data) - start))
        self.end_headers()
        cut = hub.cut_after.pop(0) if hub.cut_after else 1 << 16 if name in hub.trickling else None
        with contextlib.suppress(ConnectionError):  # the client may close the connection
            self.wfile.write(data[start : None if cut is None else start + cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _reject(self, status: int, message: str, after: str = "") -> None:
        self.send_response(status)
        self.send_header("x-error-message", message)
        if after:
            self.send_header("retry-after", after)
        self.send_header("content-length", "0")
        self.end_headers()
