"""Headless Chromium for tests of web pages: the distribution's program, driven by Playwright.

A conftest.py imports the fixtures: `from browser import chromium, driver, page`. A test fails if its page raises an
error that no script handles, or breaks its Content-Security-Policy.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from axe import axe_source
from eventually import LONG_SECONDS
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect
from run_record import used

WIDTH, HEIGHT = 1280, 800
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    # Pages are drawn by the CPU: without an emulated GPU, and in the browser's process.
    "--disable-gpu",
    "--disable-gpu-rasterization",
    "--disable-software-rasterizer",
    "--in-process-gpu",
    "--num-raster-threads=1",
    "--renderer-process-limit=1",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    # Playwright expects these of a browser that it did not start.
    "--disable-back-forward-cache",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-ipc-flooding-protection",
    "--disable-popup-blocking",
    "--disable-renderer-backgrounding",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


def executable() -> str:
    """Return the path of Chromium."""
    path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert path is not None, "Chromium is missing: apt-get install chromium"
    return path


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a browser for all tests, to which the driver of each event loop connects."""
    profile = tmp_path_factory.mktemp("chromium")
    log, endpoint = profile / "log", profile / "DevToolsActivePort"
    with log.open("w") as output:
        command = (executable(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank")
        process = subprocess.Popen(command, stdout=output, stderr=output)
    limit = time.monotonic() + LONG_SECONDS
    while not (endpoint.is_file() and endpoint.read_text().count("\n")):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)
    port, path = endpoint.read_text().splitlines()
    yield f"ws://127.0.0.1:{port}{path}"
    process.terminate()
    process.wait()


def _driver_scope(*, config: pytest.Config, **_: object) -> Literal["session", "function"]:
    return "session" if config.getini("asyncio_default_fixture_loop_scope") == "session" else "function"


@pytest.fixture(scope=_driver_scope)
async def driver(chromium: str) -> AsyncIterator[Browser]:
    """The connection to the browser, by a process: one for all tests that share an event loop."""
    expect.set_options(timeout=1000 * LONG_SECONDS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium)
        yield browser
        await browser.close()


@pytest.fixture
async def page(driver: Browser) -> AsyncIterator[Page]:
    """An empty page with a profile of its own. Its timeouts are scaled to this machine."""
    errors: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and "Content Security Policy" in message.text:
            errors.append(message.text)

    used("Chromium", driver.version)
    context = await driver.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(1000 * LONG_SECONDS)
    made = await context.new_page()
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", on_console)
    yield made
    await context.close()
    assert not errors, "\n".join(errors)


async def check_layout(page: Page) -> None:
    """Fail if axe finds an error in a colour scheme, or if the page is wider than a telephone, 360 pixels.

    The schemes differ in colours alone, so only axe's rules about colours run again in dark ones.
    """
    size = page.viewport_size
    assert size is not None
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(axe_source())
    errors: list[str] = []
    for width in dict.fromkeys((size["width"], 360)):
        await page.set_viewport_size({"width": width, "height": size["height"]})
        for scheme, rules in _SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            errors += [f"{width} px, {scheme}: {error}" for error in await page.evaluate(_AXE, rules)]
    errors += [f"360 px: {text} overflows" for text in await page.evaluate(_OVERFLOWING)]
    await page.set_viewport_size(size)
    assert not errors, "\n".join(errors)


_SCHEMES: tuple[tuple[Literal["light", "dark"], dict[str, Any]], ...] = (
    ("light", {}),
    ("dark", {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}),
)
"""Colour schemes, each with the options of axe that select the rules."""
_AXE = """async rules => (await axe.run({ ...rules, resultTypes: ["violations"] })).violations.flatMap(
    ({ id, nodes }) => nodes.map(({ html, failureSummary }) => `${id}: ${html.slice(0, 200)}: ${failureSummary}`))"""
_OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(element => {
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(outer).overflowX)) return false;
    const box = element.getBoundingClientRect();
    return box.width && (box.right > innerWidth || box.left < 0);
}).map(element => element.outerHTML.slice(0, 200))"""
"""Elements beyond the edges of the page, without the content of elements that scroll."""
