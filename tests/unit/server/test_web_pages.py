"""Protection from web pages of other sites: posts without a preflight, DNS rebinding, metrics."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from eventually import LONG_SECONDS, eventually

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.server.settings import LOOPBACK_HOSTS, is_loopback

COMPLETION = {"model": "smollm2", "prompt": "x", "temperature": 0}
ACCEPTED = [
    "application/json",
    "Application/JSON; charset=utf-8",
    'application/json; charset="UTF-8"',
    "application/json; charset=us-ascii",
    "application/vnd.api+json;charset=utf8",
]
REJECTED = [
    None,
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/json",
    "application/json-seq",
    "application/jsonx",
    "application/json; charset=utf-16",
]


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
async def test_only_json_bodies_are_accepted(running: Any, path: str, subtests: pytest.Subtests) -> None:
    body = json.dumps(COMPLETION).encode()
    for kind in ACCEPTED:
        with subtests.test(kind=kind):
            reply = await running.http.post(f"/{path}", content=body, headers={"Content-Type": kind})
            assert reply.status_code in (200, 400)
    for kind in REJECTED:
        with subtests.test(kind=kind):
            headers = {} if kind is None else {"Content-Type": kind}
            reply = await running.http.post(f"/{path}", content=body, headers=headers)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (415, "unsupported_content_type")
            assert "'Content-Type: application/json'" in error["message"]
    compressed = {"Content-Type": "application/json", "Content-Encoding": "br"}
    reply = await running.http.post(f"/{path}", content=body, headers=compressed)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")


HOSTS = [
    ("localhost", True),
    ("LOCALHOST:8000", True),
    ("127.0.0.1:8000", True),
    ("[::1]:8000", True),
    ("localhost.:8000", True),
    ("0.0.0.0:8000", True),
    ("127.0.0.2", True),
    ("pc.example:8000", True),
    ("evil.example", False),
    ("evil.example:8000", False),
    ("localhost.evil.example", False),
    ("127.0.0.1.evil.example", False),
    ("[::2]", False),
    ("192.168.0.1:8000", False),
    ("", False),
]


async def test_on_loopback_only_its_own_names_are_served(start: Any, subtests: pytest.Subtests) -> None:
    running = await start(allowed_hosts=(*LOOPBACK_HOSTS, "pc.example"))
    for host, served in HOSTS:
        for path in ("/", "/v1/models", "/livez", "/metrics"):
            with subtests.test(host=host, path=path):
                reply = await running.http.get(path, headers={"Host": host})
                assert reply.status_code == (200 if served else 403)
                if not served:
                    assert reply.json()["error"]["code"] == "host_not_allowed"
                    assert "--allowed-host" in reply.json()["error"]["message"]


async def test_a_probe_of_http_1_0_needs_no_host(start: Any) -> None:
    running = await start(allowed_hosts=LOOPBACK_HOSTS)
    address = httpx.URL(running.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
    assert b" 200 OK\r\n" in await asyncio.wait_for(reader.readline(), LONG_SECONDS)
    writer.close()
    await writer.wait_closed()


async def test_on_loopback_only_pages_of_the_server_are_accepted(start: Any, subtests: pytest.Subtests) -> None:
    running = await start(allowed_hosts=LOOPBACK_HOSTS)
    own = running.url
    for origin, served in (
        (None, True),
        (own, True),
        ("null", False),
        ("https://evil.example", False),
        ("http://localhost:1", False),
        ("http://127.0.0.1", False),
        ("http://[", False),
    ):
        with subtests.test(origin=origin):
            headers = {} if origin is None else {"Origin": origin}
            reply = await running.http.post("/v1/completions", json=COMPLETION, headers=headers)
            assert reply.status_code == (200 if served else 403)
            if not served:
                assert reply.json()["error"]["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in reply.headers


async def test_in_a_cluster_any_host_is_served(running: Any) -> None:
    reply = await running.http.get("/v1/models", headers={"Host": "models.example", "Origin": "https://a.example"})
    assert reply.status_code == 200
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_metrics_and_the_schema_need_a_key_where_keys_are_set(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{name: a, key: secret}, {name: prometheus, key: scraper, metrics: true}]\n")
    running = await start(api_keys_file=file)
    for path, status in (("/metrics", 403), ("/openapi.json", 200)):
        assert (await running.http.get(path)).status_code == 401
        assert (await running.http.get(path, headers={"Authorization": "Bearer secret"})).status_code == status
        assert (await running.http.get(path, headers={"Authorization": "Bearer scraper"})).status_code == 200
    rejected = await running.http.get("/metrics", headers={"Authorization": "Bearer secret"})
    assert rejected.json()["error"]["code"] == "metrics_not_allowed"
    assert "`metrics: true`" in rejected.json()["error"]["message"]
    file.write_text("secret\n")
    plain = await start(api_keys_file=file)
    assert (await plain.http.get("/metrics", headers={"Authorization": "Bearer secret"})).status_code == 403
    for path in ("/livez", "/readyz", "/health", "/version", "/"):
        assert (await running.http.get(path)).status_code == 200


async def test_with_a_health_port_metrics_are_served_on_it_alone(tmp_path: Path) -> None:
    """`megatron server` as a pod runs it."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    port, health_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", 'ulimit -Sn 256 && exec "$@"', "with-few-files"),
        *(sys.executable, "-m", "megatron_runtime.cli", "server", "--coordinator", "127.0.0.1:9"),
        *("--host", "127.0.0.1", "--port", str(port), "--health-port", str(health_port), "--drain-seconds", "0"),
        *("--linger-seconds", "0", "--api-keys-file", str(keys)),
    )
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=LONG_SECONDS) as http:

            async def answers() -> bool:
                try:
                    return (await http.get(f"http://127.0.0.1:{health_port}/livez")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers, what="the server answers probes")
            ready = await http.get(f"http://127.0.0.1:{health_port}/readyz")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            text = (await http.get(f"http://127.0.0.1:{health_port}/metrics")).text
            assert "megatron_num_requests_running" in text
            assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 4096  # --max-connections
            key = {"Authorization": "Bearer secret"}
            assert (await http.get(f"http://127.0.0.1:{port}/metrics", headers=key)).status_code == 404
            assert (await http.get(f"http://127.0.0.1:{port}/livez")).status_code == 200
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), LONG_SECONDS) == 0
