"""`kubectl megatron dashboard` in Chromium on a real node, for users with Kubernetes' own roles view and edit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from browser import chromium as chromium  # fixtures
from browser import driver as driver
from browser import page as page
from machine import scaled
from playwright.async_api import Page, expect
from tcp_relay import TcpRelay

from localcluster.kubectl import Kubectl
from localcluster.walkthrough import STORY

from .conftest import SAMPLE, Deployed, Platform, deploy


@contextlib.asynccontextmanager
async def dashboard(kube: Kubectl, platform: Platform, folder: Path, role: str) -> AsyncIterator[tuple[str, TcpRelay]]:
    """Run the command as a user with a ClusterRole in the namespace. Yields its URL, and its way to the API server."""
    kube("create", "serviceaccount", role)
    kube("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={kube.namespace}:{role}")
    config = yaml.safe_load(await asyncio.to_thread(platform.cluster.kubeconfig.read_text))
    config["users"] = [{"name": role, "user": {"token": kube("create", "token", role).strip()}}]
    config["contexts"][0]["context"]["user"] = role
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    assert server.port is not None
    relay = TcpRelay(server.port)
    await relay.start()
    config["clusters"][0]["cluster"]["server"] = f"https://{server.hostname}:{relay.port}"
    path = folder / f"{role}-kubeconfig"
    await asyncio.to_thread(path.write_text, yaml.safe_dump(config))
    programs = f"{Path(sys.executable).parent}:{platform.cluster.kubectl.parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *(platform.cluster.kubectl, "megatron", "dashboard", "--no-browser", "--namespace", kube.namespace),
        env={**os.environ, "KUBECONFIG": str(path), "PATH": programs},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), scaled(60))).decode()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield found[0], relay
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), scaled(30)) == 0
        await relay.stop()


async def act(page: Page, verb: str, *, engines: int | None = None) -> None:
    """Request an action and confirm it."""
    await page.get_by_role("button", name=verb, exact=True).click()
    dialog = page.get_by_role("dialog")
    if engines is not None:
        await dialog.get_by_label("Engines").fill(str(engines))
    await dialog.get_by_role("button", name=verb, exact=True).click()
    await expect(dialog).to_be_hidden()


@contextlib.asynccontextmanager
async def short_answers(demo: Deployed) -> AsyncIterator[None]:
    """Two clients that request one short answer after another."""
    done = asyncio.Event()

    async def client() -> None:
        while not done.is_set():
            await asyncio.to_thread(demo.chat.stream(STORY, max_tokens=24).wait)

    clients = [asyncio.create_task(client()) for _ in range(2)]
    yield
    done.set()
    await asyncio.gather(*clients)


async def test_a_viewer_and_an_editor(page: Page, kube: Kubectl, platform: Platform, tmp_path: Path) -> None:
    expect.set_options(timeout=1000 * scaled(120))
    pods_of_no_node = {"podTemplate": {"spec": {"nodeSelector": {"example.com/accelerator": "none"}}}}
    unplaced = yaml.safe_load(SAMPLE.read_text())
    unplaced["metadata"]["name"] = "unplaced"
    unplaced["spec"].update(dict.fromkeys(("engine", "coordinator", "server"), pods_of_no_node))
    kube.apply(unplaced)
    demo = await asyncio.to_thread(deploy, kube)
    async with dashboard(kube, platform, tmp_path, "view") as (url, _):
        await page.goto(url)
        await sees_all_and_changes_nothing(page, kube)
    async with dashboard(kube, platform, tmp_path, "edit") as (url, relay):
        await page.goto(url)
        await page.get_by_role("link", name="demo", exact=True).click()
        await sees_the_load(page, demo)
        await previews_a_change_and_reads_a_log(page, kube)
        await requests_every_action(page, demo, relay)


async def sees_all_and_changes_nothing(page: Page, kube: Kubectl) -> None:
    await expect(page.get_by_role("row").filter(has_text="demo")).to_contain_text("1/1")
    await expect(page.get_by_role("row").filter(has_text="unplaced")).to_contain_text("Unschedulable")
    await page.get_by_role("link", name="demo", exact=True).click()
    await expect(page.get_by_role("table", name="Engines")).to_contain_text("demo-engine-0")
    history = page.get_by_role("region", name="History")
    for kind in ("Condition", "Event", "Transition"):
        await expect(history.get_by_role("cell", name=kind, exact=True).first).to_be_visible()
    await expect(page.get_by_label("Explanation", exact=True).last).to_contain_text("1/1 engines ready, backend Native")
    charts = page.get_by_role("region", name="Last 15 minutes")
    await expect(charts).to_contain_text('cannot get resource "pods/proxy"')
    await act(page, "Stop")
    await expect(page.get_by_role("alert").filter(has_text="Stop: 403")).to_contain_text("cannot patch resource")
    assert kube.json("mi", "demo")["spec"].get("desiredState", "Running") == "Running"


async def sees_the_load(page: Page, demo: Deployed) -> None:
    engine = page.get_by_role("table", name="Engines").get_by_role("row").filter(has_text="demo-engine-0")
    await expect(engine).to_contain_text("%")
    throughput, first_token, between_tokens = (page.locator("figcaption > span").nth(number) for number in range(3))
    async with short_answers(demo):
        await expect(throughput).to_contain_text(re.compile("[1-9]"))
        for latency in (first_token, between_tokens):
            await expect(latency).to_contain_text(re.compile(r"p50 [\d.]+ m?s\s*p95 [\d.]+ m?s"))
        await expect(page.locator("canvas")).to_have_count(3)


async def previews_a_change_and_reads_a_log(page: Page, kube: Kubectl) -> None:
    preview = page.get_by_role("region", name="Preview")
    await preview.get_by_text("Preview a change of the spec").click()
    editor = preview.get_by_label("Spec in YAML")
    await expect(editor).to_have_value(re.compile("maxSequenceLength: 2048"))
    text = await editor.input_value()
    await editor.fill(text.replace("maxSequenceLength: 2048", "maxSequenceLength: 1024"))
    await preview.get_by_role("button", name="Preview").click()
    await expect(preview).to_contain_text("Engines that restart: demo-engine-0")
    logs = page.get_by_role("region", name="Logs")
    labels = "app.kubernetes.io/instance=demo,app.kubernetes.io/component=coordinator"
    (pod,) = kube("get", "pods", "-l", labels, "-o", "name").split()
    await logs.get_by_label("Container").select_option(f"{pod.removeprefix('pod/')}/coordinator")
    await logs.get_by_role("button", name="Follow").click()
    await expect(logs.get_by_label("Log")).to_contain_text("engine demo-engine-0 registered")


async def requests_every_action(page: Page, demo: Deployed, relay: TcpRelay) -> None:
    """Pause, a change by another user while the API server cannot be reached, and every other action."""
    shown = page.get_by_label("Resource", exact=True)
    connection = page.get_by_role("status").first
    engines = page.get_by_role("table", name="Engines").locator("tbody tr")

    async def confirmed(verb: str, state: str) -> None:
        await act(page, verb)
        await expect(page.get_by_text(f"{verb}: confirmed by every rank")).to_be_visible()
        status = demo.kube.json("mi", "demo")["status"]
        assert status["state"] == state

    await confirmed("Pause", "Paused")
    await expect(engines.first).to_contain_text("Paused")
    story = demo.chat.stream(STORY, max_tokens=64)  # it waits until the engine runs again
    await relay.stop()
    await expect(connection).to_have_text("not live; retrying")
    await expect(page.get_by_role("region", name="Logs").get_by_label("Log")).to_contain_text(
        "The log ended unexpectedly: "
    )
    assert not story.finished.is_set()
    demo.kube.patch_spec("demo", desiredState="Running")
    await asyncio.to_thread(story.wait)
    await expect(shown).to_contain_text("desired Paused")
    await relay.start(relay.port)
    await expect(shown).to_contain_text("desired Running")
    await expect(engines.first).to_contain_text("Running")
    await expect(connection).to_have_text("live")
    await confirmed("Suspend", "Suspended")
    await confirmed("Run", "Running")
    await act(page, "Scale", engines=2)
    await expect(page.get_by_text("Scale: done, 2/2 engines ready")).to_be_visible()
    await expect(engines).to_have_count(2)
    await act(page, "Restart")
    await expect(page.get_by_text("Restart: done, 2/2 engines ready")).to_be_visible()
    await confirmed("Stop", "Stopped")
    history = page.get_by_role("table", name="Conditions, Events and history")
    await expect(history).to_contain_text("by kubectl-megatron")
