"""Headless Chromium for tests of web pages: the distribution's program, driven by Playwright.

A conftest.py imports the fixture: `from browser import page`. A test fails if its page raises an error that no script
handles, or breaks its Content-Security-Policy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from machine import scaled
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect
from run_record import used

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
WIDTH, HEIGHT = 1280, 800


def executable() -> str:
    """Return the path of Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found is not None, "Chromium is missing: apt-get install chromium"
    return found


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """An empty page of a new browser with a profile of its own. Its timeouts are scaled to this machine."""
    errors: list[str] = []
    expect.set_options(timeout=1000 * scaled(30))

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and "Content Security Policy" in message.text:
            errors.append(message.text)

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=executable())
        used("Chromium", browser.version)
        context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        context.set_default_timeout(1000 * scaled(30))
        made = await context.new_page()
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.on("console", on_console)
        yield made
        await browser.close()
    assert not errors, "\n".join(errors)


async def screenshot(page: Page, name: str, *, after_seconds: float = 0.0) -> None:
    """Write docs/assets/NAME.png if MEGATRON_SCREENSHOTS=1. after_seconds: time in which charts fill."""
    if os.environ.get("MEGATRON_SCREENSHOTS") == "1":
        await page.wait_for_timeout(1000 * after_seconds)
        await page.screenshot(path=ASSETS / f"{name}.png")
