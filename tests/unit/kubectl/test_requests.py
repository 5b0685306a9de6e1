"""Requests that the dashboard rejects, its headers, its vendored files, and its command."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import fake_kubectl
import httpx
import pytest
import yaml
from click.testing import CliRunner
from machine import scaled

import megatron_kubectl.dashboard
from megatron_kubectl import cli
from megatron_kubectl.dashboard.app import POLICY

STATIC = Path(megatron_kubectl.dashboard.__file__).with_name("static")
VENDORED = {
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of the npm package uplot 1.6.32."""


async def fetch(settings: Any, path: str, method: str = "GET", *, token: bool = True, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {settings.token}"} if token else {}
    headers |= options.pop("headers", {})
    async with httpx.AsyncClient(timeout=scaled(30), trust_env=False) as client:
        return await client.request(method, f"http://127.0.0.1:{settings.port}{path}", headers=headers, **options)


@pytest.mark.parametrize("path", ["/api/session", "/api/resources", "/api/resources/default/demo"])
async def test_every_request_of_the_api_needs_the_token(settings: Any, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": settings.token}):
        assert (await fetch(settings, path, token=False, headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Content-Length : 1\r\n", 400),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"A: b\r\n c\r\n", 400),
    ],
)
async def test_malformed_requests_are_rejected_and_close_the_connection(
    settings: Any, headers: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%b\r\n0\r\n\r\n" % (settings.port, headers))
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % settings.port)
    answers = await reader.read()
    writer.close()
    assert answers.startswith(b"HTTP/1.1 %d " % status)
    assert answers.count(b"HTTP/1.1 ") == 1
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_actions_need_the_token(settings: Any, fake: Any) -> None:
    path = "/api/resources/default/demo/desired-state"
    assert (await fetch(settings, path, "POST", token=False, json={"state": "Stopped"})).status_code == 401
    assert fake.authors == []


@pytest.mark.parametrize("path", ["/", "/api/session"])
async def test_another_host_or_origin_is_rejected(settings: Any, path: str) -> None:
    hosts = ("evil.example", f"evil.example:{settings.port}", "127.0.0.1", f"127.0.0.1:{settings.port + 1}")
    for host in hosts:
        assert (await fetch(settings, path, headers={"Host": host})).status_code == 403
    origins = ("http://evil.example", "null", f"https://127.0.0.1:{settings.port}")
    for origin in origins:
        assert (await fetch(settings, path, headers={"Origin": origin})).status_code == 403
    own = {"Origin": f"http://127.0.0.1:{settings.port}"}
    assert (await fetch(settings, path, headers=own)).status_code == 200


async def test_every_answer_has_the_strict_policy(settings: Any) -> None:
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    for path in ("/", "/app.js", "/missing", "/api/session", "/api/resources/default/demo/plan"):
        reply = await fetch(settings, path)
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("demo/desired-state", {"state": "Gone"}, "state: is 'Gone'; use one of Running, Paused, Suspended, Stopped"),
        ("demo/scale", {"replicas": -1}, "replicas: is -1; use a number of engines, 0 or more"),
        ("demo/scale", {"replicas": True}, "replicas: is True"),
        ("demo/scale", ["x"], "not a JSON object"),
        ("demo/plan", {"spec": "a: [1"}, "spec: is not YAML"),
        ("demo/plan", {"spec": "7"}, "spec: is not a mapping"),
        ("%3Fx/restart", {}, "name: '?x' is not the name of an object"),
    ],
)
async def test_a_bad_request_is_rejected_with_its_field(
    settings: Any, fake: Any, path: str, body: Any, message: str
) -> None:
    reply = await fetch(settings, f"/api/resources/default/{path}", "POST", json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]
    assert fake.authors == []


async def test_errors_of_the_api_server_keep_their_code(settings: Any) -> None:
    reply = await fetch(settings, "/api/resources/default/nothing/restart", "POST", json={})
    assert reply.status_code == 404
    assert "not found" in reply.json()["error"]


async def test_logs_of_pods_of_other_resources_are_rejected(settings: Any) -> None:
    reply = await fetch(settings, "/api/resources/default/demo/logs?pod=broken-server-0")
    assert reply.status_code == 404
    assert "does not belong to default/demo" in reply.json()["error"]


def test_vendored_files_are_those_of_the_package() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    assert found == VENDORED


def test_the_page_loads_nothing_from_other_servers() -> None:
    for path in STATIC.iterdir():
        if path.is_file():
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|\"//\w|@import|url\(|innerHTML| on\w+=\"| style=\"", text), path


@pytest.fixture
def kubeconfig(fake: Any, tmp_path: Path) -> Path:
    """A kubeconfig of the fake API server, with the context `here` and its namespace `team`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_the_command_serves_until_it_is_interrupted(kubeconfig: Path) -> None:
    command = [sys.executable, "-m", "megatron_kubectl.cli", "dashboard", "--no-browser"]
    path = fake_kubectl.install(kubeconfig.parent)
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path, "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), scaled(30))).decode()
    found = re.fullmatch(r"dashboard of here: (http://127\.0\.0\.1:\d+)/#token=(\S+)\n", line)
    assert found is not None, line
    base, token = found.groups()
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(timeout=scaled(30), trust_env=False, headers=headers) as client:
        assert (await client.get(f"{base}/api/session")).json() == {"namespace": "team", "context": "here"}
        async with client.stream("GET", f"{base}/api/resources?namespace=default") as stream:
            assert '"demo"' in await anext(stream.aiter_lines())
            process.send_signal(signal.SIGINT)
            assert (await asyncio.wait_for(process.stdout.read(), scaled(30))).decode() == ""
    assert await asyncio.wait_for(process.wait(), scaled(30)) == 0


def test_an_unknown_context_is_named(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("PATH", fake_kubectl.install(kubeconfig.parent))
    result = CliRunner().invoke(cli.main, ["dashboard", "--context", "there"])
    assert result.exit_code == 1
    assert "--context: the kubeconfig has no context 'there'; use one of here" in result.output
