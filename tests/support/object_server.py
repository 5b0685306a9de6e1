"""Object stores on loopback: moto's S3 server, fake-gcs-server and Azurite, and a proxy that injects faults."""

from __future__ import annotations

import base64
import hmac
import json
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, urlsplit

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import AzureStore, S3Store
from threaded_server import serving

from megatron_runtime.cli.processes import free_ports

BUCKET = "models"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_PIECE_BYTES = 64 << 10


@dataclass
class FaultyProxy:
    """A proxy that forwards GET, HEAD and PUT requests to a server, and injects faults.

    upstream:  URL of the server.
    cut_after: bytes of the body after which the connection of an object breaks, one entry per GET with a range.
    statuses:  answered instead of a response, one entry per request.
    paused:    while set, bodies of more than 1 MiB stop after their first half.
    rate:      bytes per second of each body; 0: as fast as possible.
    requests:  (method, path with query, range) of each request.
    sent:      bytes of the bodies that were sent, by the last part of the path.
    host:      address to listen on.
    """

    upstream: str
    cut_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    paused: threading.Event = field(default_factory=threading.Event)
    halted: threading.Event = field(default_factory=threading.Event)
    rate: int = 0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""
    host: str = "127.0.0.1"

    def ranges(self, name: str) -> list[str | None]:
        """Return the ranges of the GET requests of an object."""
        return [part for method, path, part in self.requests if method == "GET" and path.split("?")[0].endswith(name)]

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        with serving(Handler, host=self.host) as server:
            server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIECE_BYTES)  # `sent` is what left, nearly
            self.url = f"http://{self.host}:{server.server_port}"
            yield self


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        proxy, wanted = self.owner, self.headers.get("range")
        proxy.requests.append((self.command, self.path, wanted))
        if proxy.statuses:
            self.send_response(proxy.statuses.pop(0))
            self.send_header("content-length", "0")
            self.end_headers()
            return
        upstream = HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        upstream.request(self.command, self.path, headers=headers)
        response = upstream.getresponse()
        body = response.read()
        upstream.close()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = response.getheader("content-length") if self.command == "HEAD" else str(len(body))
        self.send_header("content-length", length or "0")
        self.end_headers()
        cut = proxy.cut_after.pop(0) if wanted and proxy.cut_after else None
        if proxy.paused.is_set() and len(body) > 1 << 20:
            cut = len(body) // 2
        body = body if cut is None else body[:cut]
        try:
            self._send(body)
        except ConnectionError:
            return
        if cut is not None:
            self.wfile.flush()
            if proxy.paused.is_set():
                proxy.halted.set()
                self._wait_for_the_peer()
            self.close_connection = True

    do_HEAD = do_GET

    def _send(self, body: bytes) -> None:
        name = urlsplit(self.path).path.rpartition("/")[2]
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            self.wfile.write(piece)
            self.owner.sent[name] += len(piece)
            if rate := self.owner.rate:
                threading.Event().wait(len(piece) / rate)

    def _wait_for_the_peer(self) -> None:
        """Keep the connection open until the client closes it."""
        try:
            while self.connection.recv(1, socket.MSG_PEEK):
                threading.Event().wait(0.05)
        except OSError:
            pass


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of an S3 server with the bucket `models`."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        connection = HTTPConnection(f"{host}:{port}", timeout=30)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield url
    finally:
        server.stop()


def upload(url: str, prefix: str, files: Mapping[str, bytes]) -> None:
    """Put files into the bucket of an S3 server."""
    store = S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=url,
        access_key_id="key",
        secret_access_key="secret",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    for name, data in files.items():
        obstore.put(store, name, data)


GCS_SERVER = "github.com/fsouza/fake-gcs-server@v1.56.1"


@contextmanager
def gcs_server(programs: Path) -> Iterator[str]:
    """Yield the URL of a Google Cloud Storage server with the bucket `models`. Its program is built once.

    programs: directory of the program.
    """
    program = programs / "fake-gcs-server"
    if not program.exists():
        environment = os.environ | {"GOBIN": str(programs), "GOFLAGS": "-mod=mod"}
        subprocess.run(["go", "install", GCS_SERVER], check=True, env=environment, cwd=programs, capture_output=True)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = [
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        str(port),
        "-backend",
        "memory",
        "-public-host",
        f"127.0.0.1:{port}",
    ]
    with subprocess.Popen([program, *options], stderr=subprocess.DEVNULL) as server:
        try:
            body = json.dumps({"name": BUCKET})
            while not _post(port, "/storage/v1/b", body.encode(), "application/json"):
                assert server.poll() is None, "the server ended"
                threading.Event().wait(0.05)
            yield url
        finally:
            server.terminate()


def upload_to_gcs(url: str, prefix: str, files: Mapping[str, bytes]) -> None:
    """Put files into the bucket of a Google Cloud Storage server."""
    for name, data in files.items():
        query = f"uploadType=media&name={quote(f'{prefix}/{name}')}"
        assert _post(urlsplit(url).port or 0, f"/upload/storage/v1/b/{BUCKET}/o?{query}", data, "text/plain")


def _post(port: int, path: str, body: bytes, kind: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body=body, headers={"content-type": kind})
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()


AZURITE = "azurite@3.35.0"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of the server, which its documentation publishes."""


@contextmanager
def azure_server(programs: Path) -> Iterator[str]:
    """Yield the URL of an Azure Blob Storage server with the container `models`. Its package is installed once.

    programs: directory of the package.
    """
    program = programs / "node_modules/.bin/azurite-blob"
    if not program.exists():
        install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", programs, AZURITE]
        subprocess.run(install, check=True, capture_output=True)
    (port,) = free_ports(1)
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _create_container(port):
                assert server.poll() is None, "the server ended"
                threading.Event().wait(0.1)
            yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        finally:
            server.terminate()


def _create_container(port: int) -> bool:
    date, version = formatdate(usegmt=True), "2021-08-06"
    path = f"/{AZURE_ACCOUNT}/{BUCKET}"
    signed = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"])
    signed += f"\n/{AZURE_ACCOUNT}{path}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "content-length": "0"}
    headers["authorization"] = f"SharedKey {AZURE_ACCOUNT}:{signature}"
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        return connection.getresponse().status == 201
    except ConnectionError:
        return False
    finally:
        connection.close()


def upload_to_azure(url: str, prefix: str, files: Mapping[str, bytes]) -> None:
    """Put files into the container of an Azure Blob Storage server."""
    store = AzureStore(
        BUCKET,
        prefix=prefix,
        account_name=AZURE_ACCOUNT,
        account_key=AZURE_KEY,
        endpoint=url,
        client_options={"allow_http": True},
    )
    for name, data in files.items():
        obstore.put(store, name, data)
