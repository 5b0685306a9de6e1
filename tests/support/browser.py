"""Headless Chromium for tests of web pages: the distribution's program, driven by Playwright.

A conftest.py imports the fixtures: `from browser import chromium, driver, page`. A test fails if its page raises an
error that no script handles, or breaks its Content-Security-Policy.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Literal

import pytest
from axe import axe_source
from eventually import LONG_SECONDS
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect
from run_record import used

from megatron_runtime.cli.processes import free_ports

WIDTH, HEIGHT = 1280, 800


def executable() -> str:
    """Return the path of Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found is not None, "Chromium is missing: apt-get install chromium"
    return found


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """The URL of a browser for all tests. It runs on a thread, because each test has an event loop of its own."""
    (port,) = free_ports(1)
    running: Future[asyncio.AbstractEventLoop] = Future()
    end = asyncio.Event()

    async def run() -> None:
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(
                executable_path=executable(), args=[f"--remote-debugging-port={port}"]
            )
            running.set_result(asyncio.get_running_loop())
            await end.wait()
            await browser.close()

    def run_or_fail() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if not running.done():
                running.set_exception(error)
            raise

    thread = threading.Thread(target=run_or_fail, name="chromium", daemon=True)
    thread.start()
    loop = running.result()
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(end.set)
    thread.join()


def _driver_scope(*, config: pytest.Config, **_: object) -> Literal["session", "function"]:
    return "session" if config.getini("asyncio_default_fixture_loop_scope") == "session" else "function"


@pytest.fixture(scope=_driver_scope)
async def driver(chromium: str) -> AsyncIterator[Browser]:
    """The connection to the browser, which is a process: one for all tests that share an event loop."""
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
    """Fail if axe finds an error in a colour scheme, or if the page is wider than a telephone, 360 pixels."""
    found: list[str] = []
    size = page.viewport_size
    assert size is not None
    for width in (size["width"], 360):
        await page.set_viewport_size({"width": width, "height": size["height"]})
        for scheme in _SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            await page.evaluate(axe_source())
            for violation in (await page.evaluate("axe.run()"))["violations"]:
                for node in violation["nodes"]:
                    rule = f"{width} px, {scheme}: {violation['id']}"
                    found.append(f"{rule}: {node['html'][:200]}: {node['failureSummary']}")
    found += [f"360 px: {text} overflows" for text in await page.evaluate(_OVERFLOWING)]
    await page.set_viewport_size(size)
    assert not found, "\n".join(found)


_SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(element => {
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(outer).overflowX)) return false;
    const box = element.getBoundingClientRect();
    return box.width && (box.right > innerWidth || box.left < 0);
}).map(element => element.outerHTML.slice(0, 200))"""
"""Elements beyond the edges of the page, without the content of elements that scroll."""
