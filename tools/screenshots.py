"""Takes the screenshots for the documentation: `make screenshots` writes docs/assets/*.png and demo.svg.

The dashboard shows custom resources in the fake API server of the tests. The operator's code has decided the states of
these resources. `megatron serve` serves the chat page, with the built-in model. demo.svg shows what `make demo` prints
on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from playwright.async_api import Page, async_playwright, expect
from rich.console import Console

from megatron_kubectl.dashboard.app import Dashboard, DashboardServer, DashboardSettings
from megatron_operator.cluster.api import KubeApi
from megatron_runtime.cli.processes import free_ports

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
SUPPORT = (ROOT / "tests" / "support", ROOT / "tests" / "unit" / "kubectl")
MODEL: dict[str, Any] = {"model": {"source": {"builtin": "smollm2-135m"}}}
WIDTH, HEIGHT = 1280, 800
WAIT_MS = 180_000
CHART_SECONDS = 60
QUESTION = "What is the capital of France?"
RECORDING_COLUMNS = 118


@contextlib.asynccontextmanager
async def dashboard() -> AsyncIterator[str]:
    """Serve a dashboard of three custom resources, and yield its URL."""
    fake_api, memory = importlib.import_module("fake_api"), importlib.import_module("in_memory_cluster")
    broken = memory.Cluster({**MODEL, "replicas": 1}, name="broken")
    broken.broken_engines.add("broken-engine-0")
    idle = memory.Cluster({**MODEL, "replicas": 1, "desiredState": "Suspended"}, name="nightly")
    fake = fake_api.FakeApi(memory.Cluster({**MODEL, "replicas": 3}), broken, idle)
    await fake.start()
    configuration = Configuration()
    configuration.host = fake.url
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = DashboardSettings(listener.getsockname()[1], "", "production", sample_seconds=1.0)
        async with KubeApi(configuration) as api:
            server = DashboardServer(Dashboard(api, settings))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            yield settings.url
            server.should_exit = True
            await serving
    await fake.stop()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.asynccontextmanager
async def chat() -> AsyncIterator[str]:
    """Run `megatron serve` with the built-in model, and yield its URL."""
    (port,) = free_ports(1)
    program = Path(sys.executable).with_name("megatron")
    arguments = ("serve", "builtin:smollm2-135m", "--port", str(port))
    process = await asyncio.create_subprocess_exec(program, *arguments, stdout=asyncio.subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + WAIT_MS / 1000
        while not await asyncio.to_thread(_is_ready, url):
            if process.returncode is not None or time.monotonic() > deadline:
                sys.exit("megatron serve is not ready")
            await asyncio.sleep(0.5)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def picture(page: Page, name: str) -> None:
    await page.screenshot(path=ASSETS / f"{name}.png")
    print(f"docs/assets/{name}.png")


def record_demo() -> None:
    """Run `make demo` on a new cluster, and draw its steps as terminal output in docs/assets/demo.svg."""
    subprocess.run(["make", "cluster-down"], cwd=ROOT, check=True)
    demo = subprocess.run(
        ["make", "demo"], cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = demo.stdout.replace(f"{ROOT}/", "")
    console = Console(record=True, file=io.StringIO(), width=RECORDING_COLUMNS, highlight=False)
    console.print("[bold green]$[/] [bold]make demo[/]")
    for line in output.splitlines():
        if step := re.fullmatch(r"(\[ *[\d.]+ s\]) (.*)", line):
            console.print(step[1], style="cyan", markup=False, end=" ")
            console.print(step[2], markup=False)
    console.save_svg(str(ASSETS / "demo.svg"), title="make demo")
    print("docs/assets/demo.svg")


async def main() -> None:
    """Take all screenshots."""
    sys.path[:0] = map(str, SUPPORT)
    expect.set_options(timeout=WAIT_MS)
    executable = importlib.import_module("browser").executable()
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=executable)
        page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        async with dashboard() as url:
            await page.goto(url)
            await expect(page.get_by_role("row").filter(has_text="broken")).to_contain_text("CrashLooping")
            await picture(page, "dashboard-list")
            await page.get_by_role("link", name="demo", exact=True).click()
            await expect(page.locator("figcaption > span").first).to_contain_text(re.compile("[1-9]"))
            await page.wait_for_timeout(1000 * CHART_SECONDS)
            await picture(page, "dashboard-resource")
        async with chat() as url:
            await page.goto(url)
            await expect(page.locator("#state")).to_have_text("ready")
            await page.get_by_text("Settings").click()
            await page.get_by_label("Temperature").fill("0")
            await page.get_by_text("Settings").click()
            await page.get_by_label("Message", exact=True).fill(QUESTION)
            await page.keyboard.press("Enter")
            await expect(page.locator(".figures")).to_have_count(1)
            await picture(page, "chat")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
    record_demo()
