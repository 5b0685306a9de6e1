"""/v1/status and the page /status: the state of the server's own resource, from its coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from browser import check_layout, page
from browser import chromium as chromium  # fixtures
from browser import driver as driver
from playwright.async_api import Page, expect

from megatron_runtime.protocol.adapters import Adapter, AdapterList

pytestmark = pytest.mark.timeout(300)
__all__ = ["page"]


async def test_engines_queue_and_epoch(running: Any) -> None:
    reply = await running.http.get("/v1/status")
    assert reply.status_code == 200
    found = reply.json()
    assert {key: found[key] for key in ("state", "epoch", "queued", "in_flight", "adapters")} == {
        "state": "RUNNING",
        "epoch": 7,
        "queued": 5,
        "in_flight": 3,
        "adapters": [],
    }
    first, second = found["engines"]
    assert (first["name"], first["state"], first["ranks"], first["in_flight"]) == ("engine-0", "RUNNING", 2, 3)
    assert (first["serving"], second["serving"]) == (True, False), "an engine that drains gets no request"


async def test_requests_of_other_clients_are_not_shown(running: Any) -> None:
    reported = await running.backend.status()
    assert reported.failed_requests
    text = (await running.http.get("/v1/status")).text
    assert reported.failed_requests[0].uid not in text
    assert "failed" not in text


async def test_many_clients_ask_the_coordinator_once(running: Any) -> None:
    replies = await asyncio.gather(*(running.http.get("/v1/status") for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    # The answer is a second old at most; a slow machine may need several seconds for 20 requests.
    assert running.backend.status_requests < len(replies)


async def test_without_a_coordinator(running: Any) -> None:
    running.backend.connected = False
    reply = await running.http.get("/v1/status")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "coordinator_unreachable")


async def test_the_page_needs_no_key_and_its_data_do(page: Page, start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    running = await start(api_keys_file=tmp_path / "keys")
    running.backend.adapters = AdapterList((Adapter("sql", "hf:org/sql"),))
    assert (await running.http.get("/v1/status")).status_code == 401
    await page.goto(running.url)
    await page.get_by_role("link", name="Status").click()
    await expect(page.get_by_role("alert")).to_contain_text("API key")
    key = page.get_by_label("API key")
    await expect(key).to_be_focused()
    await check_layout(page)
    await key.fill("secret")
    await key.press("Enter")
    facts = page.locator("dl")
    await expect(facts).to_contain_text("Engines that serve1/2")
    await expect(facts).to_contain_text("Queued5")
    await expect(page.get_by_role("alert")).to_be_hidden()
    await expect(page.get_by_role("status")).to_have_text("live")
    engine = page.get_by_role("table", name="Engines").get_by_role("row").filter(has_text="engine-0")
    await expect(engine).to_contain_text("RUNNING")
    await expect(engine.get_by_role("cell").nth(2)).to_have_text("yes")
    await expect(page.get_by_role("table", name="Adapters")).to_contain_text("sql")
    await check_layout(page)
