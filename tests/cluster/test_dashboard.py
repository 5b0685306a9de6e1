"""The dashboard against a real API server, operator, coordinator and engines: actions, permissions, expired watches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from eventually import LONG_SECONDS, eventually

from megatron_kubectl.dashboard.app import Dashboard, DashboardServer, DashboardSettings
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.auth import load_configuration
from megatron_operator.cluster.kinds import SECRET
from megatron_operator.install import EDIT_RULES, VIEW_RULES

from .api_server_proxy import ApiProxy
from .conftest import ACCOUNT, BINDING, ROLE

pytestmark = pytest.mark.cluster

EXEC_API = "client.authentication.k8s.io/v1"
READ = ["get", "list", "watch"]
VIEW = [
    *VIEW_RULES,
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": READ},
]


@contextlib.asynccontextmanager
async def user(api: KubeApi, namespace: str, config: str, folder: Path, name: str, rules: Any) -> AsyncIterator[Any]:
    """A dashboard of an account with these rules in the namespace, through a proxy. Yields its settings and proxy."""
    meta = {"name": name, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    await api.create(ACCOUNT, {"metadata": meta}, manager="test")
    await api.create(ROLE, {"metadata": meta, "rules": rules}, manager="test")
    binding = {"metadata": meta, "roleRef": role, "subjects": [{"kind": "ServiceAccount", **meta}]}
    await api.create(BINDING, binding, manager="test")
    answer = await api.request("POST", ACCOUNT.path(namespace, name, subresource="token"), body={"spec": {}})
    content = yaml.safe_load(config)
    content["users"] = [{"name": name, "user": {"token": answer["status"]["token"]}}]
    content["contexts"][0]["context"]["user"] = name
    path = folder / f"{name}-kubeconfig"
    await asyncio.to_thread(path.write_text, yaml.safe_dump(content))
    proxy = ApiProxy(path)
    await proxy.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = DashboardSettings(listener.getsockname()[1], namespace, name, sample_seconds=1.0)
        async with KubeApi(await load_configuration(kubeconfig=proxy.kubeconfig(path))) as own:
            server = DashboardServer(Dashboard(own, settings))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            yield settings, proxy
            server.should_exit = True
            await serving
    await proxy.stop()


class Browser:
    """The requests that the page sends for the resource `demo`. `parts`: what its stream has brought so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, namespace: str) -> None:
        self._socket = socket
        self._where = {"namespace": namespace, "name": "demo"}
        self._numbers = itertools.count(2)
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.parts: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        await self._socket.send_json({"id": 1, "do": "observe", **self._where})
        async for message in self._socket:
            answer = message.json()
            number, value = answer.get("id"), answer.get("value")
            if number == 1:
                async with self._changed:
                    self.parts[value["part"]] = value["value"]
                    self._changed.notify_all()
            elif "ask" in answer:
                await self._socket.send_json({"id": number, "go": True})
            elif "value" in answer or "error" in answer:
                self._ends[number].set_result(answer)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def request(self, action: str, **body: Any) -> dict[str, Any]:
        """Return the answer of a verb, with `value` or `error`."""
        number = next(self._numbers)
        end = self._ends[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "do": action, **self._where, **body})
        return await asyncio.wait_for(end, LONG_SECONDS)

    async def until(self, condition: Callable[[dict[str, Any]], Any]) -> None:
        """Wait until the stream has brought what meets the condition."""
        try:
            async with asyncio.timeout(LONG_SECONDS), self._changed:
                await self._changed.wait_for(lambda: "resource" in self.parts and condition(self.parts))
        except TimeoutError:
            raise AssertionError(f"the stream brought only {json.dumps(self.parts, indent=1)}") from None

    async def reaches(self, state: str) -> None:
        """Request a state, and wait until every rank has confirmed it."""
        answer = await self.request("set-state", state=state)
        generation = answer["value"]["generation"]
        await self.until(
            lambda parts: (
                parts["resource"]["settled"]
                and parts["resource"]["status"]["state"] == state
                and parts["resource"]["status"]["observedGeneration"] >= generation
            )
        )


@contextlib.asynccontextmanager
async def opened(port: int, token: str, namespace: str) -> AsyncIterator[Browser]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/api/socket") as socket,
    ):
        await socket.send_json({"token": token})
        assert "session" in await socket.receive_json(timeout=LONG_SECONDS)
        browser = Browser(socket, namespace)
        yield browser
        await browser.close()


async def test_actions_permissions_and_expired_watches(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    await resource.create()
    config = await asyncio.to_thread(control_plane.kubeconfig.read_text)
    async with (
        user(api, namespace, config, tmp_path, "viewer", VIEW) as (settings, _),
        opened(settings.port, settings.token, namespace) as browser,
    ):
        await browser.until(lambda parts: parts["resource"]["status"].get("state") == "Running")
        denied = await browser.request("set-state", state="Stopped")
        assert denied["error"].startswith("403 Forbidden")
        assert "cannot patch resource" in denied["error"]
        await browser.until(lambda parts: "cannot get resource" in parts["errors"].get("metrics", ""))
        assert "pods/proxy" in browser.parts["errors"]["metrics"]
        assert (await resource.status())["state"] == "Running"
    async with (
        user(api, namespace, config, tmp_path, "editor", [*VIEW, *EDIT_RULES]) as (settings, proxy),
        opened(settings.port, settings.token, namespace) as browser,
    ):
        for state in ("Paused", "Suspended", "Running"):
            await browser.reaches(state)
            assert (await resource.status())["state"] == state
        await eventually(lambda: asyncio.to_thread(lambda: proxy.watches >= 3), what="its watches are open")
        proxy.expire_watches()
        assert "value" in await browser.request("scale", replicas=2)
        await browser.until(lambda parts: parts["resource"]["status"].get("ready") == "2/2")
        attempt = browser.parts["resource"]["status"].get("attempt")
        assert "value" in await browser.request("restart")
        await browser.until(lambda parts: parts["resource"]["status"].get("attempt") != attempt)
        await browser.until(lambda parts: parts["resource"]["status"].get("ready") == "2/2")
        await browser.reaches("Stopped")
        history = browser.parts["resource"]["status"]["history"]
        assert (history[-1]["to"], history[-1]["by"]) == ("Stopped", "kubectl-megatron")
        await browser.until(lambda parts: any(event["reason"] == "Stopped" for event in parts["events"]))
    assert (await resource.status())["state"] == "Stopped"


@contextlib.asynccontextmanager
async def started(variables: dict[str, str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, str]]:
    """`kubectl megatron dashboard` as a process; yields it with its port and token."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_kubectl.cli", "dashboard", "--no-browser"),
        env=variables,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), LONG_SECONDS)).decode()
    found = re.search(r"http://127\.0\.0\.1:(\d+)/#token=(\S+)", line)
    assert found is not None, line
    yield process, int(found[1]), found[2]
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), LONG_SECONDS) == 0


PLUGIN = """#!/bin/sh
echo run >>{folder}/runs
cat {folder}/credential
"""
"""A login plugin of kubectl."""


async def test_credentials_are_renewed_by_kubectl_and_a_stalled_kubectl_executes_nothing(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    """The first token is revoked, as at the end of its life, before the page requests a verb. Then kubectl stalls."""
    await resource.create()
    meta = {"name": "editor", "namespace": namespace}
    await api.create(ACCOUNT, {"metadata": meta}, manager="test")
    await api.create(ROLE, {"metadata": meta, "rules": [*VIEW, *EDIT_RULES]}, manager="test")
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "editor"}
    await api.create(
        BINDING, {"metadata": meta, "roleRef": role, "subjects": [{"kind": "ServiceAccount", **meta}]}, manager="test"
    )

    async def issue(name: str) -> str:
        """Let the plugin hand out a token that is valid while a Secret exists."""
        await api.create(SECRET, {"metadata": {"name": name, "namespace": namespace}}, manager="test")
        bound = {"boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": name}}
        answer = await api.request("POST", ACCOUNT.path(namespace, "editor", subresource="token"), body={"spec": bound})
        token = answer["status"]["token"]
        made = {"apiVersion": EXEC_API, "kind": "ExecCredential", "status": {"token": token}}
        await asyncio.to_thread((tmp_path / "credential").write_text, json.dumps(made))
        return str(token)

    first = await issue("first")
    plugin = tmp_path / "login"
    plugin.write_text(PLUGIN.format(folder=tmp_path))
    plugin.chmod(0o755)
    config = yaml.safe_load(await asyncio.to_thread(control_plane.kubeconfig.read_text))
    run = {"apiVersion": EXEC_API, "command": str(plugin), "interactiveMode": "Never"}
    config["users"] = [{"name": "editor", "user": {"exec": run}}]
    config["contexts"][0]["context"] |= {"user": "editor", "namespace": namespace}
    path = tmp_path / "kubeconfig"
    await asyncio.to_thread(path.write_text, yaml.safe_dump(config))
    programs = f"{control_plane.program('kubectl').parent}{os.pathsep}{os.environ['PATH']}"
    # Nothing listens there: kubectl does not use it for the address of the API server.
    proxies = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.0/8"}
    variables = {**os.environ, "KUBECONFIG": str(path), "PATH": programs, "PYTHONUNBUFFERED": "1", **proxies}
    async with (
        started(variables) as (process, port, token),
        opened(port, token, namespace) as browser,
    ):
        await browser.reaches("Paused")
        await issue("second")
        await api.request("DELETE", SECRET.path(namespace, "first"))

        async def is_rejected() -> bool:
            server = config["clusters"][0]["cluster"]["server"]
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{server}/api", ssl=False, headers={"Authorization": f"Bearer {first}"}) as answer,
            ):
                return answer.status == 401

        await eventually(is_rejected, what="the API server rejects the first token")
        await browser.reaches("Running")
        children = psutil.Process(process.pid).children(recursive=True)
        kubectl = [child for child in children if child.name() == "kubectl"][-1]
        kubectl.suspend()
        answer = await browser.request("set-state", state="Stopped")
        kubectl.resume()
        assert answer["error"].startswith("the API server did not answer within 10 s"), answer
        await browser.reaches("Suspended")
        history = [entry["to"] for entry in browser.parts["resource"]["status"]["history"]]
        assert "Stopped" not in history, "a request that timed out in kubectl is not executed later"
    assert (tmp_path / "runs").read_text() == "run\n" * 2
