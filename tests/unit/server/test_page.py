"""The chat page at /: it loads nothing from other servers, and chats with the model in headless Chromium."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import check_layout, page
from browser import chromium as chromium  # fixtures
from browser import driver as driver
from playwright.async_api import Page, expect

from megatron_runtime.server.app import PAGE_FILES

pytestmark = pytest.mark.timeout(300)
__all__ = ["page"]

MARKDOWN_IT = "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525"
"""SHA-256 of dist/browser/markdown-it.esm.min.mjs of markdown-it 15.0.3 (npm), without its last line, which names a
source map."""
RICH = """# Fruit

| name | colour |
|---|---|
| lemon | yellow |

```python
print("<b>1</b>")
```

See [the site](https://example.com) ![picture](https://example.com/a.png) <img src=x onerror=alert(1)>."""


async def test_no_file_of_the_page_names_another_server(running: Any) -> None:
    reply = await running.http.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    for path in ("/", *(f"/page/{name}" for name in PAGE_FILES if not name.startswith("vendor/"))):
        text = (await running.http.get(path)).text
        assert not re.search(r"https?://|@import|url\(|['\"]//", text), path
        assert not re.search(r"<[^>]+ (on\w+|style)=", text), "the policy forbids handlers and styles in elements"


async def test_its_policy_admits_only_its_own_files(running: Any) -> None:
    for path in ("/", "/page/chat.js"):
        policy = (await running.http.get(path)).headers["content-security-policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert {rules[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        assert "unsafe" not in policy
    assert (await running.http.get("/page/../app.py")).status_code == 404
    assert (await running.http.get("/page/index.html")).status_code == 404


async def test_the_vendored_library_is_the_published_one(running: Any) -> None:
    reply = await running.http.get("/page/vendor/markdown-it.esm.min.js")
    assert hashlib.sha256(reply.content).hexdigest() == MARKDOWN_IT


SETTINGS = "localStorage['megatron.settings'] ??= JSON.stringify({temperature: 0})"


async def opened(page: Page, running: Any) -> None:
    """Open the page with settings whose answers the backend knows."""
    await page.add_init_script(SETTINGS)
    await page.goto(running.url)
    await expect(page.locator("#state")).to_have_text("ready")


async def send(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def prompt(running: Any, number: int) -> str:
    """The prompt of a request that the backend got."""
    return str(running.tokenizer.decode(running.backend.requests[number][0]))


async def test_a_conversation_streams_and_is_kept_in_the_browser(page: Page, running: Any, answer: str) -> None:
    await page.add_init_script("window.tick = 0; let now = 1; performance.now = () => now += window.tick")
    await opened(page, running)
    await expect(page.locator("#model")).to_have_value("smollm2")
    await send(page, "Hello?")
    await expect(page.locator(".assistant .content")).to_have_text(answer.strip())
    # Within one tick of the clock: there is no rate.
    await expect(page.locator(".figures")).to_have_text(re.compile(r"^\d+ \+ \d+ tokens · first token 0\.00 s$"))
    await page.evaluate("window.tick = 250")
    await send(page, "And then?")
    await expect(page.locator(".assistant .content")).to_have_text([answer.strip()] * 2)
    assert "Hello?" in prompt(running, 1)
    assert answer.strip()[:20] in prompt(running, 1)
    figures = re.compile(r"^\d+ \+ \d+ tokens · first token 0\.25 s · [\d.]+ tokens/s$")
    await expect(page.locator(".figures").last).to_have_text(figures)
    await expect(page.locator("#spoken")).to_have_text(answer.strip())  # whole, once: for screen readers
    assert await page.locator("[aria-live]").count() == 0

    await page.reload()
    await page.get_by_role("button", name="Hello?", exact=True).click()
    await expect(page.locator(".turn .content")).to_have_text(["Hello?", answer.strip(), "And then?", answer.strip()])
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export", exact=True).click()
    exported = await (await download.value).path()
    (kept,) = json.loads(await asyncio.to_thread(exported.read_text))
    assert [turn["content"] for turn in kept["turns"]][::2] == ["Hello?", "And then?"]
    await page.get_by_role("button", name="Delete the conversation Hello?").click()
    await expect(page.locator("#conversations li")).to_have_count(0)
    await expect(page.locator(".turn")).to_have_count(0)
    await page.reload()
    await expect(page.locator("#conversations li")).to_have_count(0)


async def test_regenerate_and_edit_ask_again_without_what_followed(page: Page, running: Any, answer: str) -> None:
    await opened(page, running)
    for text in ("First?", "Second?"):
        await send(page, text)
        await expect(page.locator(".figures")).to_have_count(1 + (text == "Second?"))
    await page.get_by_role("button", name="Regenerate").first.click()
    await expect(page.locator(".turn")).to_have_count(2)
    await expect(page.locator(".figures")).to_have_count(1)
    assert prompt(running, 2) == prompt(running, 0)
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Edit message").fill("Third?")
    await page.get_by_role("button", name="Send", exact=True).first.click()
    await expect(page.locator(".user .content")).to_have_text(["Third?"])
    await expect(page.locator(".figures")).to_have_count(1)
    assert "Third?" in prompt(running, 3)
    assert "First?" not in prompt(running, 3)


async def test_answers_are_markdown_without_html_and_images(page: Page, running: Any) -> None:
    running.backend.answer = RICH
    await opened(page, running)
    await send(page, "Show everything.")
    content = page.locator(".assistant .content")
    await expect(content.locator("h1")).to_have_text("Fruit")
    await expect(content.locator("td").last).to_have_text("yellow")
    await expect(content.locator("pre")).to_have_text('print("<b>1</b>")\n')
    await expect(content.locator("a").first).to_have_attribute("rel", "noopener noreferrer")
    assert await content.locator("img, b").count() == 0
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await content.locator(".code").get_by_role("button", name="Copy").click()
    await expect(content.get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == 'print("<b>1</b>")\n'


async def test_reasoning_is_folded_when_the_answer_begins_and_sent_back(page: Page, start_with_template: Any) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}>{{ m.content }};{% endfor %}<think>"
    running = await start_with_template(template, special=["<think>", "</think>"], reasoning_parser="think")
    running.backend.answer = "Hm.</think>Yes."
    await opened(page, running)
    await send(page, "Hello?")
    await expect(page.locator(".assistant .content")).to_have_text("Yes.")
    assert await page.locator("details").first.get_attribute("open") is None
    await page.get_by_text("Reasoning").click()
    await expect(page.get_by_text("Hm.")).to_be_visible()
    await send(page, "And?")
    await expect(page.locator(".figures")).to_have_count(2)
    assert prompt(running, 1) == ">Hello?;Hm.>Yes.;>And?;"


async def test_a_question_stopped_before_its_answer_is_kept(page: Page, running: Any, answer: str) -> None:
    running.backend.free_tokens = 0
    running.backend.gate.clear()
    await opened(page, running)
    await send(page, "Hello?")
    await expect(page.locator("#send")).to_have_text("Stop")
    await page.get_by_label("Message", exact=True).fill("a draft")
    await page.keyboard.press("Escape")
    await expect(page.locator(".assistant .error")).to_have_text("Stopped before the first token.")
    await page.reload()
    await page.get_by_role("button", name="Hello?", exact=True).click()
    await expect(page.locator(".user .content")).to_have_text(["Hello?"])
    running.backend.gate.set()
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator(".turn .content")).to_have_text(["Hello?", answer.strip()])
    await send(page, "And then?")
    await expect(page.locator(".figures")).to_have_count(2)
    assert prompt(running, -1).count("Hello?") == 1


async def test_an_answer_that_streams_is_stopped_or_replaced(page: Page, running: Any, answer: str) -> None:
    running.backend.free_tokens = 3
    running.backend.gate.clear()
    await opened(page, running)
    await send(page, "First?")
    content = page.locator(".assistant .content")
    await expect(content).not_to_be_empty()
    await page.get_by_role("button", name="Stop").click()
    regenerate = page.get_by_role("button", name="Regenerate")
    await expect(regenerate).to_be_visible()
    arrived = (await content.inner_text()).strip()
    assert arrived
    assert answer.strip().startswith(arrived)
    await regenerate.click()
    await expect(content).not_to_be_empty()
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Edit message").fill("Second?")
    await page.get_by_role("button", name="Send", exact=True).click()
    running.backend.gate.set()
    await expect(page.locator(".figures")).to_have_count(1)
    await page.reload()
    await page.get_by_role("button", name="First?", exact=True).click()
    await expect(page.locator(".turn .content")).to_have_text(["Second?", answer.strip()])


async def test_an_error_is_shown_and_its_question_is_not_sent_again(page: Page, running: Any, answer: str) -> None:
    await opened(page, running)
    await send(page, "word " * 9000)
    await expect(page.locator(".error")).to_contain_text("maximum context length")
    await send(page, "Hello?")
    await expect(page.locator(".assistant .content")).to_have_text(answer.strip())
    assert "word word" not in prompt(running, 0)


async def test_it_asks_for_a_key_and_sends_settings(page: Page, start: Any, answer: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    running = await start(api_keys_file=tmp_path / "keys")
    await page.goto(running.url)
    await expect(page.get_by_label("API key")).to_be_focused()
    await expect(page.locator("#state")).to_contain_text("API key")
    await page.keyboard.type("secret")
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_label("Longest answer (tokens)").fill("5")
    await expect(page.locator("#state")).to_have_text("ready")
    await send(page, "Hello?")
    await expect(page.locator(".figures")).to_have_count(1)
    _, params = running.backend.requests[0][:2]
    assert (params.temperature, params.num_tokens_to_generate) == (0.0, 5)
    await page.reload()
    await expect(page.get_by_label("Longest answer (tokens)")).to_have_value("5")
    assert await page.get_by_label("API key").input_value() == "", "a key is not kept"


async def test_without_a_connection_it_keeps_the_question_and_connects_again(
    page: Page, running: Any, answer: str
) -> None:
    failures = 1000

    async def fail(route: Any) -> None:
        nonlocal failures
        failures -= 1
        await (route.abort() if failures >= 0 else route.continue_())

    await page.route("**/v1/models", fail)
    await page.clock.install()
    await page.add_init_script(SETTINGS)
    await page.goto(running.url)
    state = page.locator("#state")
    await expect(state).to_contain_text("no connection")
    await send(page, "Hello?")
    await expect(page.locator(".assistant .error")).to_contain_text("no connection")
    failures = 0
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator(".turn .content")).to_have_text(["Hello?", answer.strip()])

    failures = 2
    await page.reload()
    for _ in range(2):
        await expect(state).to_contain_text("no connection")
        await page.clock.fast_forward(5000)
        await asyncio.sleep(0)
    await expect(state).to_have_text("ready")


LONG = f"{'x' * 300} `{'y' * 300}`\n\n```\n{'z' * 300}\n```\n\n| {'| '.join('wide ' * 30)}|\n{'|---' * 30}|\n"


async def test_the_layout_on_every_screen(page: Page, start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    running = await start(api_keys_file=tmp_path / "keys")
    await page.goto(running.url)
    await expect(page.locator("#state")).to_contain_text("API key")
    await check_layout(page)
    await page.get_by_label("API key").fill("secret")
    await page.get_by_label("Temperature").fill("0")
    await expect(page.locator("#state")).to_have_text("ready")
    running.backend.answer = RICH + LONG
    await send(page, f"Show everything, {'also long words ' * 20}{'w' * 300}.")
    await expect(page.locator(".figures")).to_have_count(1)
    await send(page, "word " * 9000)
    await expect(page.locator(".error")).to_contain_text("maximum context length")
    await check_layout(page)
    await page.get_by_role("button", name="Edit").first.click()
    await page.set_viewport_size({"width": 360, "height": 800})
    await page.locator("#toggle-history").click()
    await check_layout(page)


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


async def test_characters_that_change_the_direction_are_escapes(page: Page, running: Any) -> None:
    escapes = "".join(f"\\u{ord(char):04x}" for char in BIDI)
    running.backend.answer = f"Answer {BIDI} `code {BIDI}` &#x202e;"
    await opened(page, running)
    await send(page, f"Question {BIDI}")
    await expect(page.locator(".user .content")).to_have_text(f"Question {escapes}")
    content = page.locator(".assistant .content")
    await expect(content).to_have_text(f"Answer {escapes} code {escapes} \\u202e")
    await expect(page.locator("#conversations .open")).to_have_text(f"Question {escapes}")
    await expect(page.locator("#spoken")).to_contain_text(escapes)
    shown = await page.evaluate("document.documentElement.outerHTML + document.title")
    assert not set(BIDI) & set(shown)
    assert BIDI in prompt(running, 0), "the text that is sent stays as it is"
