"""The dashboard against a real API server, operator, coordinator and engines: actions, permissions, expired watches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import page as page  # the fixture
from machine import scaled
from playwright.async_api import Page, expect

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


async def act(page: Page, verb: str) -> None:
    await page.get_by_role("button", name=verb, exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()


async def test_actions_permissions_and_expired_watches(
    page: Page, resource: Any, operator: Any, node: Any, api: Any, namespace: str, control_plane: Any, tmp_path: Path
) -> None:
    expect.set_options(timeout=1000 * scaled(60))
    await resource.create()
    config = await asyncio.to_thread(control_plane.kubeconfig.read_text)
    async with user(api, namespace, config, tmp_path, "viewer", VIEW) as (settings, _):
        await page.goto(settings.url)
        await page.get_by_role("link", name="demo", exact=True).click()
        await expect(page.get_by_label("Resource", exact=True)).to_contain_text("1/1 engines ready")
        await act(page, "Stop")
        denied = page.get_by_role("alert").filter(has_text="Stop: 403")
        await expect(denied).to_contain_text("cannot patch resource")
        charts = page.get_by_role("region", name="Last 15 minutes")
        await expect(charts).to_contain_text("cannot get resource")
        await expect(charts).to_contain_text("pods/proxy")
        assert (await resource.status())["state"] == "Running"
    async with user(api, namespace, config, tmp_path, "editor", [*VIEW, *EDIT_RULES]) as (settings, proxy):
        await page.goto(settings.url)
        await page.get_by_role("link", name="demo", exact=True).click()
        for verb, state in (("Pause", "Paused"), ("Suspend", "Suspended"), ("Run", "Running")):
            await act(page, verb)
            await expect(page.get_by_text(f"{verb}: confirmed by every rank")).to_be_visible()
            assert (await resource.status())["state"] == state
        assert proxy.expire_watches() >= 3
        await page.get_by_role("button", name="Scale", exact=True).click()
        await page.get_by_role("dialog").get_by_label("Engines").fill("2")
        await page.get_by_role("dialog").get_by_role("button", name="Scale", exact=True).click()
        await expect(page.get_by_text("Scale: done, 2/2 engines ready")).to_be_visible()
        await act(page, "Restart")
        await expect(page.get_by_text("Restart: done, 2/2 engines ready")).to_be_visible()
        history = page.get_by_role("table", name="Conditions, Events and history")
        await expect(history).to_contain_text("by kubectl-megatron")
        await act(page, "Stop")
        await expect(page.get_by_text("Stop: confirmed by every rank")).to_be_visible()
    assert (await resource.status())["state"] == "Stopped"
