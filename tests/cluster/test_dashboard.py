"""The dashboard against a real API server, operator, coordinator and engines: actions, permissions, expired watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from eventually import LONG_SECONDS, eventually

from megatron_kubectl.dashboard.app import Dashboard, DashboardServer, DashboardSettings
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.auth import load_configuration
from megatron_operator.install import EDIT_RULES, VIEW_RULES

from .api_server_proxy import ApiProxy
from .conftest import ACCOUNT, BINDING, ROLE

pytestmark = pytest.mark.cluster

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

    def __init__(self, settings: DashboardSettings) -> None:
        self._path = f"/api/resources/{settings.namespace}/demo"
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}",
            headers={"Authorization": f"Bearer {settings.token}"},
            timeout=LONG_SECONDS,
            trust_env=False,
        )
        self.parts: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._http.stream("GET", self._path, timeout=None) as stream:
            async for line in stream.aiter_lines():
                frame = json.loads(line)
                async with self._changed:
                    self.parts[frame["part"]] = frame["value"]
                    self._changed.notify_all()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._http.aclose()

    async def request(self, action: str, **body: Any) -> httpx.Response:
        return await self._http.post(f"{self._path}/{action}", json=body)

    async def until(self, condition: Callable[[dict[str, Any]], Any]) -> None:
        """Wait until the stream has brought what meets the condition."""
        try:
            async with asyncio.timeout(LONG_SECONDS), self._changed:
                await self._changed.wait_for(lambda: "resource" in self.parts and condition(self.parts))
        except TimeoutError:
            raise AssertionError(f"the stream brought only {json.dumps(self.parts, indent=1)}") from None

    async def reaches(self, state: str) -> None:
        """Request a state, and wait until every rank has confirmed it."""
        answer = await self.request("desired-state", state=state)
        assert answer.status_code == 200, answer.text
        generation = answer.json()["generation"]
        await self.until(
            lambda parts: (
                parts["resource"]["settled"]
                and parts["resource"]["status"]["state"] == state
                and parts["resource"]["status"]["observedGeneration"] >= generation
            )
        )


@contextlib.asynccontextmanager
async def opened(settings: DashboardSettings) -> AsyncIterator[Browser]:
    browser = Browser(settings)
    yield browser
    await browser.close()


async def test_actions_permissions_and_expired_watches(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    await resource.create()
    config = await asyncio.to_thread(control_plane.kubeconfig.read_text)
    async with (
        user(api, namespace, config, tmp_path, "viewer", VIEW) as (settings, _),
        opened(settings) as browser,
    ):
        await browser.until(lambda parts: parts["resource"]["status"].get("ready") == "1/1")
        denied = await browser.request("desired-state", state="Stopped")
        assert (denied.status_code, "cannot patch resource" in denied.json()["error"]) == (403, True)
        await browser.until(lambda parts: "cannot get resource" in parts["errors"].get("metrics", ""))
        assert "pods/proxy" in browser.parts["errors"]["metrics"]
        assert (await resource.status())["state"] == "Running"
    async with (
        user(api, namespace, config, tmp_path, "editor", [*VIEW, *EDIT_RULES]) as (settings, proxy),
        opened(settings) as browser,
    ):
        for state in ("Paused", "Suspended", "Running"):
            await browser.reaches(state)
            assert (await resource.status())["state"] == state
        await eventually(lambda: asyncio.to_thread(lambda: proxy.watches >= 3), what="its watches are open")
        proxy.expire_watches()
        assert (await browser.request("scale", replicas=2)).status_code == 200
        await browser.until(lambda parts: parts["resource"]["status"].get("ready") == "2/2")
        attempt = browser.parts["resource"]["status"].get("attempt")
        assert (await browser.request("restart")).status_code == 200
        await browser.until(lambda parts: parts["resource"]["status"].get("attempt") != attempt)
        await browser.until(lambda parts: parts["resource"]["status"].get("ready") == "2/2")
        await browser.reaches("Stopped")
        history = browser.parts["resource"]["status"]["history"]
        assert (history[-1]["to"], history[-1]["by"]) == ("Stopped", "kubectl-megatron")
        await browser.until(lambda parts: any(event["reason"] == "Stopped" for event in parts["events"]))
    assert (await resource.status())["state"] == "Stopped"
