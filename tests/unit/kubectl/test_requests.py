"""Requests that the dashboard rejects, its headers, its vendored files, and its command."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import fake_kubectl
import httpx
import psutil
import pytest
from click.testing import CliRunner
from eventually import eventually
from machine import scaled

import megatron_kubectl.dashboard
from megatron_kubectl import cli
from megatron_kubectl.dashboard.app import BAD_MESSAGE, BAD_TOKEN, Dashboard, DashboardSettings, policy
from megatron_runtime.protocol import strict_json

STATIC = Path(megatron_kubectl.dashboard.__file__).with_name("static")
VENDORED = {
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of the npm package uplot 1.6.32."""


async def fetch(settings: Any, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=scaled(30), trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{settings.port}{path}", **options)


@asynccontextmanager
async def connected(settings: Any, token: Any, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A connection that has sent this token."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{settings.port}/api/socket", **options) as found,
    ):
        await found.send_json({"token": token})
        yield found


async def ask(settings: Any, **request: Any) -> list[dict[str, Any]]:
    """Return the answers of a request until its end. A verb is repeated."""
    async with connected(settings, settings.token) as socket:
        assert "session" in await socket.receive_json(timeout=scaled(30))
        await socket.send_json({"id": 1, **request})
        found: list[dict[str, Any]] = []
        while True:
            answer = await socket.receive_json(timeout=scaled(30))
            if "id" in answer:
                found.append(answer)
            if "ask" in answer:
                await socket.send_json({"id": 1, "go": True})
            if "done" in answer or "error" in answer:
                return found


@pytest.mark.parametrize("token", ["", "wrong", None, 7, "\udc80"])
async def test_nothing_is_answered_without_the_token(settings: Any, fake: Any, token: Any) -> None:
    async with connected(settings, token) as socket:
        await socket.send_json({"id": 1, "do": "set-state", "namespace": "default", "name": "demo", "state": "Stopped"})
        answer = await socket.receive(timeout=scaled(30))
        assert answer.type == aiohttp.WSMsgType.CLOSE
        assert answer.data in (BAD_TOKEN, BAD_MESSAGE)
    assert fake.authors == []


def test_the_token_of_the_opened_browser_is_valid_once() -> None:
    """It is an argument of the browser's program, which other users of the machine see."""
    dashboard = Dashboard(cast(Any, None), DashboardSettings(1, "", ""))
    token = dashboard.single_use_token
    session = dashboard.session(token)
    assert session is not None
    assert session["token"] == dashboard.settings.token != token
    assert dashboard.session(token) is None
    assert dashboard.session(session["token"]) == session


@pytest.mark.parametrize(
    "message", ["", "{", "[]", '{"id": "x"}', '{"do": "list"}', '{"id": 1, "do": "list"}{"id": 2}', b"\x00"]
)
async def test_a_malformed_message_closes_the_connection(settings: Any, message: str | bytes) -> None:
    async with connected(settings, settings.token) as socket:
        assert "session" in await socket.receive_json(timeout=scaled(30))
        await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_str(message))
        answer = await socket.receive(timeout=scaled(30))
        assert (answer.type, answer.data) == (aiohttp.WSMsgType.CLOSE, BAD_MESSAGE)


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


@pytest.mark.parametrize("path", ["/", "/api/socket"])
async def test_another_host_or_origin_is_rejected(settings: Any, path: str) -> None:
    hosts = ("evil.example", f"evil.example:{settings.port}", "127.0.0.1", f"127.0.0.1:{settings.port + 1}")
    origins = ("http://evil.example", "null", f"https://127.0.0.1:{settings.port}")
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade = {**upgrade, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="} if path == "/api/socket" else {}
    for headers in (*({"Host": host} for host in hosts), *({"Origin": origin} for origin in origins)):
        assert (await fetch(settings, path, headers={**upgrade, **headers})).status_code == 403
    own = {"Origin": f"http://127.0.0.1:{settings.port}"}
    if path == "/":
        assert (await fetch(settings, path, headers=own)).status_code == 200
    else:
        async with connected(settings, settings.token, headers=own) as socket:
            assert "session" in await socket.receive_json(timeout=scaled(30))


async def test_every_answer_has_the_strict_policy(settings: Any) -> None:
    expected = policy(settings.port)
    assert "unsafe" not in expected
    assert "default-src 'none'" in expected
    for path in ("/", "/app.js", "/missing", "/api/socket"):
        reply = await fetch(settings, path)
        assert reply.headers["content-security-policy"] == expected
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"do": "set-state", "state": "Gone"}, "state: is 'Gone'; use one of Running, Paused, Suspended, Stopped"),
        ({"do": "scale", "replicas": -1}, "replicas: is -1; use a number of engines, 0 or more"),
        ({"do": "scale", "replicas": True}, "replicas: is True"),
        ({"do": "plan", "spec": "a: [1"}, "spec: is not YAML"),
        ({"do": "plan", "spec": "7"}, "spec: is not a mapping"),
        ({"do": "restart", "name": "?x"}, "name: '?x' is not the name of an object"),
        ({"do": "observe", "name": "../x"}, "name: '../x' is not the name of an object"),
        ({"do": "list", "namespace": "a/b"}, "namespace: 'a/b' is not the name of an object"),
        ({"do": "restart", "name": "nothing"}, "not found"),
        ({"do": "log", "pod": "broken-server-0"}, "does not belong to default/demo"),
        ({"do": "remove"}, "do: is 'remove'; use one of list, observe, log, plan, set-state, scale, restart"),
    ],
)
async def test_a_bad_request_is_rejected_with_its_field(
    settings: Any, fake: Any, request_: dict[str, Any], message: str
) -> None:
    answers = await ask(settings, **{"namespace": "default", "name": "demo", **request_})
    assert message in answers[-1]["error"]
    assert fake.authors == []


async def test_a_verb_that_the_page_does_not_repeat_is_not_executed(
    settings: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_kubectl.dashboard.app.GO_SECONDS", 0.2)
    async with connected(settings, settings.token) as socket:
        await socket.send_json({"id": 1, "do": "set-state", "namespace": "default", "name": "demo", "state": "Stopped"})
        answers = [await socket.receive_json(timeout=scaled(30)) for _ in range(3)]
        assert answers[1] == {"id": 1, "ask": True}
        assert answers[2]["error"].startswith("not executed: the page did not repeat the request")
        await socket.send_json({"id": 1, "go": True})
        await socket.send_json({"id": 2, "do": "restart", "namespace": "default", "name": "?"})
        assert "name: '?'" in (await socket.receive_json(timeout=scaled(30)))["error"]
    assert fake.authors == []


async def started(socket: aiohttp.ClientWebSocketResponse, **request: Any) -> None:
    """Send a request about `demo`. A verb is repeated, so that the dashboard executes it."""
    await socket.send_json({"id": 1, "namespace": "default", "name": "demo", **request})
    if request["do"] != "observe":
        while "ask" not in await socket.receive_json(timeout=scaled(30)):
            pass
        await socket.send_json({"id": 1, "go": True})


async def observed(socket: aiohttp.ClientWebSocketResponse, part: str, holds: Callable[[Any], bool]) -> None:
    """Return when a part of the observed resource is as `holds` says. Fails at JSON that browsers reject."""
    while True:
        frame = (await socket.receive_json(timeout=scaled(30), loads=strict_json.loads)).get("value", {})
        if frame.get("part") == part and holds(frame["value"]):
            return


async def test_metrics_that_are_not_finite_are_left_out(settings: Any, fake: Any) -> None:
    """JSON has no such numbers: a frame with one made the page open its stream again, for ever."""
    fake.values = {
        "megatron_kv_cache_usage_perc": "NaN",
        "megatron_generation_tokens_total": "+Inf",
        # Finite, but their sum over the engines is not.
        "megatron_num_requests_waiting": "1.7e308",
    }
    async with connected(settings, settings.token) as socket:
        await started(socket, do="observe")

        def holds(samples: Any) -> bool:
            engine = samples[-1]["engines"].get("demo-engine-1", {})
            return engine.get("prefix_hit_rate") == pytest.approx(0.75) and engine["kv_usage"] is None

        await observed(socket, "samples", holds)


async def test_broken_watches_are_continued(settings: Any, fake: Any) -> None:
    async with connected(settings, settings.token) as socket:
        await started(socket, do="observe")
        await observed(socket, "resource", lambda resource: resource["desired"] == "Running")
        before = fake.watches
        fake.cut_watches()
        fake.clusters["demo"].patch(desiredState="Paused")
        await observed(socket, "resource", lambda resource: resource["desired"] == "Paused")
    assert fake.watches > before


@pytest.mark.parametrize("verb_seconds", [0.5])
async def test_a_verb_without_an_answer_of_the_api_server_is_cancelled(settings: Any, fake: Any) -> None:
    demo = {"namespace": "default", "name": "demo"}
    fake.reads_bodies.clear()
    answers = await ask(settings, do="set-state", state="Paused", **demo)
    assert re.match(r"the API server did not answer within 0\.5 s, and the request was cancelled", answers[-1]["error"])
    fake.reads_bodies.set()
    assert "done" in (await ask(settings, do="restart", **demo))[-1]
    assert len(fake.authors) == 1
    assert fake.clusters["demo"].spec.get("desiredState", "Running") == "Running"


async def test_a_verb_is_sent_again_with_new_credentials(settings: Any, fake: Any) -> None:
    fake.expired["PATCH"] = 1
    answers = await ask(settings, do="set-state", state="Paused", namespace="default", name="demo")
    assert "done" in answers[-1]
    assert fake.clusters["demo"].spec["desiredState"] == "Paused"


async def test_a_page_that_closes_cancels_its_verb(settings: Any, fake: Any) -> None:
    async def is_sent() -> bool:
        return fake.unread == 1

    async def is_cancelled() -> bool:
        return fake.unread == 0

    fake.reads_bodies.clear()
    async with connected(settings, settings.token) as socket:
        await started(socket, do="set-state", state="Paused")
        await eventually(is_sent, what="the API server has the patch")
    await eventually(is_cancelled, what="the patch is cancelled")
    fake.reads_bodies.set()
    assert "done" in (await ask(settings, do="restart", namespace="default", name="demo"))[-1]
    assert len(fake.authors) == 1
    assert fake.clusters["demo"].spec.get("desiredState", "Running") == "Running"


def test_vendored_files_are_those_of_the_package() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    assert found == VENDORED


def test_the_page_loads_nothing_from_other_servers() -> None:
    for path in STATIC.iterdir():
        if path.is_file():
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|\"//\w|@import|url\(|innerHTML| on\w+=\"| style=\"", text), path


async def test_the_command_serves_until_it_is_interrupted(command: Any) -> None:
    base, _, token = command.url.partition("/#token=")
    settings = SimpleNamespace(port=int(base.rpartition(":")[2]), token=token)
    async with connected(settings, token) as socket:
        session = {"namespace": "default", "context": "here", "seconds": 10.0, "token": token}
        assert await socket.receive_json(timeout=scaled(30)) == {"session": session}
        await socket.send_json({"id": 1, "do": "list", "namespace": "default"})
        names = {each["name"] for each in (await socket.receive_json(timeout=scaled(30)))["value"]["resources"]}
        assert names == {"demo", "broken"}
        command.process.send_signal(signal.SIGINT)
        assert (await asyncio.wait_for(command.process.stdout.read(), scaled(30))).decode() == ""
    assert await asyncio.wait_for(command.process.wait(), scaled(30)) == 0


async def test_the_command_ends_with_kubectl(command: Any) -> None:
    proxies = [
        each for each in psutil.Process(command.process.pid).children(recursive=True) if "proxy" in each.cmdline()
    ]
    proxies[-1].kill()
    output = (await asyncio.wait_for(command.process.stdout.read(), scaled(30))).decode()
    assert "kubectl proxy has ended" in output
    assert await asyncio.wait_for(command.process.wait(), scaled(30)) == 1


def test_an_unknown_context_is_named(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("PATH", fake_kubectl.install(kubeconfig.parent))
    result = CliRunner().invoke(cli.main, ["dashboard", "--context", "there"])
    assert result.exit_code == 1
    assert "--context: the kubeconfig has no context 'there'; use one of here" in result.output
