"""No client sends a credential to another server than the one that it was given for, and clients of the API server
follow no redirect at all: a pod behind the API server's proxy could choose what is read with the user's credentials.

`tests/unit/loading/test_hub.py` has the tests of the hub's client, the only one that follows redirects.
"""

from __future__ import annotations

import ast
import asyncio
import http.server
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import click
import httpx
import pytest
from kubernetes.aio.client import Configuration
from soak import pairwise

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.auth import kopf_session
from megatron_operator.cluster.watch_ages import WatchAges
from megatron_operator.cluster.watching import stream
from megatron_operator.verify import VerificationError, _answers, _session
from megatron_runtime.cli.api_client import ApiClient
from megatron_runtime.cli.bench.serve import measure
from megatron_runtime.process.tracing import Tracer

SOURCES = Path(__file__).parents[3]
SECRET = "secret-of-the-user"


class Server:
    """Answers every request with a redirect to `target`, or with 404. requests: path and headers of each."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.target, self.status = "", 404
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(server.status)
                self.send_header("location", server.target)
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_POST = do_PATCH = answer

            def log_message(self, *_: Any) -> None: ...

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """A server that redirects, and another one."""
    made = Server(), Server()
    yield made
    for each in made:
        each.http.shutdown()
        each.http.server_close()


def _configuration(url: str) -> Configuration:
    made = Configuration()
    made.host, made.api_key = url, {"BearerToken": f"Bearer {SECRET}"}
    return made


async def _request(url: str) -> None:
    async with KubeApi(_configuration(url)) as api:
        await api.request("GET", "/api/v1/namespaces/n/pods/p:8080/proxy/metrics")


async def _patch(url: str) -> None:
    async with KubeApi(_configuration(url)) as api:
        await api.request("PATCH", "/apis/x", body={}, content_type="application/merge-patch+json")


async def _stream(url: str) -> None:
    async with KubeApi(_configuration(url)) as api, stream(api, "/log", query={}, silence_seconds=60):
        pass


async def _kopf(url: str) -> None:
    async with kopf_session(_configuration(url), watches=WatchAges(watch_seconds=40)).aiohttp_session as session:
        await session.get(f"{url}/apis/x?watch=true")


async def _verify(url: str) -> None:
    async with _session() as session:
        await _answers(session, url, SECRET)


async def _chat(url: str) -> None:
    await asyncio.to_thread(ApiClient(url, api_key=SECRET).first_model)


async def _generate(url: str) -> None:
    stream = ApiClient(url, api_key=SECRET).stream("completions", {"prompt": "x"})
    await asyncio.to_thread(list, stream)


async def _bench(url: str) -> None:
    options: dict[str, Any] = {"model": "m", "requests": 1, "prompt_words": 1, "new_tokens": 1}
    await asyncio.to_thread(measure, 1, url=url, api_key=SECRET, **options)


CLIENTS: dict[str, Callable[[str], Awaitable[None]]] = {
    each.__name__.strip("_"): each for each in (_request, _patch, _stream, _kopf, _verify, _chat, _generate, _bench)
}
FAILURES = (KubeApiError, aiohttp.ClientError, VerificationError, click.ClickException, httpx.HTTPError)


@pytest.mark.parametrize(
    ("status", "same_server", "name"), pairwise([301, 302, 303, 307, 308], [True, False], [*CLIENTS])
)
async def test_no_redirect_is_followed(
    servers: tuple[Server, Server], status: int, same_server: bool, name: str
) -> None:
    server, other = servers
    server.status, server.target = status, f"{(server if same_server else other).url}/elsewhere"
    with pytest.raises(FAILURES):
        await CLIENTS[name](server.url)
    assert other.requests == []
    ((path, headers),) = server.requests
    assert path != "/elsewhere"
    assert headers["authorization"] == f"Bearer {SECRET}"


def test_a_collector_of_traces_cannot_redirect_its_headers(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, other = servers
    server.status, server.target = 307, f"{other.url}/elsewhere"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}")
    tracer = Tracer("test")
    tracer.begin("span", headers={}).end()
    tracer.close()
    assert [headers["api-key"] for _, headers in server.requests] == [SECRET]
    assert other.requests == []


HTTP_CLIENTS = {
    # Follow no redirect, as the tests above show.
    "operator/megatron_operator/cluster/auth.py": {"aiohttp.ClientSession"},
    "operator/megatron_operator/cluster/api.py": {"kubernetes.aio.client.ApiClient"},
    "operator/megatron_operator/verify.py": {"aiohttp.ClientSession"},
    "runtime/megatron_runtime/cli/api_client.py": {"httpx.Client"},
    "runtime/megatron_runtime/cli/bench/serve.py": {"httpx.AsyncClient"},
    # Never follows one: http.client.
    "operator/megatron_kubectl/proxy.py": {"http.client.HTTPConnection"},
    "operator/megatron_operator/controller/observe.py": {"http.client.HTTPConnection"},
    # Sends no credential; tests/unit/server/test_media.py has the tests of its redirects.
    "runtime/megatron_runtime/server/openai/media.py": {"httpx.AsyncClient"},
    # Follows them, without the token for other servers.
    "runtime/megatron_runtime/checkpoints/remote/hub.py": {"httpx2.Client"},
}
"""Every HTTP client of the project, by file. A new one needs a test of redirects above."""
_CONSTRUCTORS = {
    *(
        f"{library}.{name}"
        for library in ("httpx", "httpx2")
        for name in ("Client", "AsyncClient", "get", "post", "put", "request", "stream")
    ),
    *(f"requests.{name}" for name in ("Session", "get", "post", "put", "request")),
    *(f"urllib.request.{name}" for name in ("urlopen", "build_opener", "Request")),
    *("http.client.HTTPConnection", "http.client.HTTPSConnection", "aiohttp.ClientSession", "aiohttp.request"),
    *("kubernetes.aio.client.ApiClient", "kubernetes.client.ApiClient"),
}
_LIBRARIES = "|".join({name.partition(".")[0] for name in _CONSTRUCTORS})
_IMPORT = re.compile(rf"^\s*(?:import|from) .*\b(?:{_LIBRARIES})\b", re.MULTILINE)
ANNOTATIONS_ONLY = {"operator/megatron_operator/cluster/watch_ages.py"}


def _clients(source: str) -> set[str]:
    """Return the constructors of HTTP clients that a module names, by their full names."""
    tree = ast.parse(source)
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = set(origins.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.add(f"{origins.get(first, first)}.{rest}")
    return names & _CONSTRUCTORS


@pytest.mark.slow
def test_every_http_client_of_the_project_is_known() -> None:
    files = [file for folder in ("operator", "runtime", "kernels") for file in (SOURCES / folder).rglob("*.py")]
    sources = {str(file.relative_to(SOURCES)): file.read_text() for file in files}
    found = {name: _clients(source) for name, source in sources.items() if _IMPORT.search(source)}
    found = {name: clients for name, clients in found.items() if clients and name not in ANNOTATIONS_ONLY}
    assert found == HTTP_CLIENTS
