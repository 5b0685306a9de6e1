"""The page in Chromium: what it shows, every action, denied permissions, and broken connections."""

from __future__ import annotations

import re
import signal
from typing import Any

from browser import check_layout
from playwright.async_api import Page, expect
from soak import size


async def open_resource(page: Page, settings: Any) -> None:
    await page.goto(settings.url)
    await page.get_by_role("link", name="demo", exact=True).click()
    await expect(page.get_by_role("heading", name="default/demo")).to_be_visible()


async def change_to(page: Page, name: str) -> None:
    """Leave the page of a resource for the page of another one."""
    await page.get_by_role("link", name="← Resources").click()
    await page.get_by_role("link", name=name, exact=True).click()


async def act(page: Page, verb: str) -> None:
    """Request an action and confirm it."""
    await page.get_by_role("button", name=verb, exact=True).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text(f"{verb} default/demo?")
    await dialog.get_by_role("button", name=verb, exact=True).click()
    await expect(dialog).to_be_hidden()


async def test_the_list_is_live_and_a_deleted_resource_has_no_actions(page: Page, settings: Any, fake: Any) -> None:
    await page.goto(settings.url)
    assert await page.evaluate("location.hash") == "#/", "the token stays in no history entry"
    demo = page.get_by_role("row").filter(has_text="demo")
    await expect(demo).to_contain_text("Running")
    await expect(demo).to_contain_text("2/2")
    broken = page.get_by_role("row").filter(has_text="broken")
    await expect(broken).to_contain_text("CrashLooping")
    fake.clusters["demo"].patch(desiredState="Paused")
    await expect(demo).to_contain_text("Paused")
    await fake.delete("broken")
    await expect(broken).to_have_count(0)
    await page.get_by_role("link", name="demo", exact=True).click()
    await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_enabled()
    await fake.delete("demo")
    await expect(page.get_by_text("There is no such resource.")).to_be_visible()
    for verb in ("Run", "Pause", "Suspend", "Stop", "Scale", "Restart"):
        await expect(page.get_by_role("button", name=verb, exact=True)).to_be_disabled()


async def test_a_resource_with_engines_charts_history_log_and_explanation(page: Page, settings: Any, fake: Any) -> None:
    await open_resource(page, settings)
    row = page.get_by_role("table", name="Engines").get_by_role("row").filter(has_text="demo-engine-1")
    # queue, queued tokens, running, KV use, prefix hits
    await expect(row).to_contain_text("Running25004")
    await expect(row).to_contain_text("75 %")
    await expect(page.get_by_label("Resource", exact=True)).to_contain_text("3 queued")
    charts = page.get_by_role("region", name="Last 15 minutes")
    await expect(charts.locator("canvas")).to_have_count(3)
    await expect(charts).to_contain_text("p95")
    throughput = charts.locator("figcaption").first
    await expect(throughput).not_to_contain_text("no requests")
    history = page.get_by_role("table", name="Conditions, Events and history")
    for kind in ("Condition", "Event", "Transition"):
        await expect(history.get_by_role("cell", name=kind, exact=True).first).to_be_visible()
    await expect(page.get_by_label("Explanation", exact=True).last).to_contain_text("waits for nothing")
    logs = page.get_by_role("region", name="Logs")
    await logs.get_by_label("Container").select_option("demo-engine-1-0/engine")
    await logs.get_by_role("button", name="Follow").click()
    await expect(logs.get_by_label("Log")).to_contain_text("line 3 of demo-engine-1-0 engine")
    await logs.get_by_role("button", name="Stop following").click()
    await expect(logs.get_by_role("button", name="Follow", exact=True)).to_be_visible()
    await change_to(page, "broken")
    await expect(page.get_by_label("Explanation", exact=True).last).to_contain_text("CrashLooping")
    await expect(page.get_by_label("Explanation", exact=True).last).to_contain_text("on node node-a")


async def test_every_state_is_requested_and_confirmed_by_every_rank(page: Page, settings: Any, fake: Any) -> None:
    await open_resource(page, settings)
    toolbar = page.get_by_role("toolbar", name="Actions")
    fake.holds = True
    await act(page, "Pause")
    progress = page.get_by_role("status").filter(has_text="Pause:")
    await expect(progress).to_contain_text("1 of 2 ranks confirmed")
    await expect(toolbar.locator("xpath=..").locator("progress")).to_be_visible()
    fake.holds = False
    await expect(progress).to_contain_text("Pause: confirmed by every rank")
    for verb, state in (("Suspend", "Suspended"), ("Run", "Running"), ("Stop", "Stopped"), ("Run", "Running")):
        await act(page, verb)
        await expect(page.get_by_text(f"{verb}: confirmed by every rank")).to_be_visible()
        assert fake.clusters["demo"].state == state
    assert set(fake.authors) == {"kubectl-megatron"}


async def test_scale_and_restart(page: Page, settings: Any, fake: Any) -> None:
    await open_resource(page, settings)
    await page.get_by_role("button", name="Scale", exact=True).click()
    number = page.get_by_role("dialog").get_by_label("Engines")
    await expect(number).to_be_focused()
    await number.fill("3")
    await number.press("Enter")
    await expect(page.get_by_text("Scale: done, 3/3 engines ready")).to_be_visible()
    assert len(fake.clusters["demo"].engine_pods()) == 3
    await act(page, "Restart")
    await expect(page.get_by_text("Restart: done, 3/3 engines ready")).to_be_visible()
    assert fake.clusters["demo"].restarted_at


async def test_a_change_of_the_spec_is_previewed(page: Page, settings: Any, fake: Any) -> None:
    await open_resource(page, settings)
    preview = page.get_by_role("region", name="Preview")
    await preview.get_by_text("Preview a change of the spec").click()
    editor = preview.get_by_label("Spec in YAML")
    await expect(editor).to_have_value(re.compile("replicas: 2"))
    text = await editor.input_value()
    await editor.fill(text.replace("replicas: 2", "replicas: 3"))
    await preview.get_by_role("button", name="Preview").click()
    await expect(preview.get_by_role("cell", name="StatefulSet demo-engine-2")).to_be_visible()
    await expect(preview).to_contain_text("Engines that restart: none")
    await editor.fill(text.replace("replicas: 2", "replicas: many"))
    await preview.get_by_role("button", name="Preview").click()
    await expect(preview.get_by_role("alert")).to_contain_text("spec.replicas")
    assert fake.authors == []


async def test_a_denied_read_is_reported_and_leaves_the_rest(page: Page, settings: Any, fake: Any) -> None:
    fake.denied |= {"GET /proxy/metrics", "GET /events"}
    await open_resource(page, settings)
    resource, engines = page.get_by_label("Resource", exact=True), page.get_by_role("table", name="Engines")
    await expect(resource).to_contain_text("2/2 engines ready")
    await expect(engines).to_contain_text("demo-engine-1")
    charts, history = (page.get_by_role("region", name=name) for name in ("Last 15 minutes", "History"))
    for region, path in ((charts, "proxy/metrics"), (history, "events")):
        await expect(region).to_contain_text(re.compile(rf'User "jane" cannot get \S+/{path}'))
    fake.denied.clear()
    # Metrics behind a network policy: the message names the value of the chart that opens them.
    fake.blocked.add("/proxy/metrics")
    await expect(charts).to_contain_text("networkPolicy.apiServer")
    fake.denied.add("GET /pods")
    await change_to(page, "broken")
    await expect(page.get_by_text(re.compile(r'User "jane" cannot get \S+/pods')).first).to_be_visible()
    await expect(resource).to_contain_text("0/1 engines ready")
    await expect(engines).to_contain_text("broken-engine-0")


async def test_an_action_that_is_not_confirmed_or_denied_changes_nothing(page: Page, settings: Any, fake: Any) -> None:
    await open_resource(page, settings)
    stop = page.get_by_role("button", name="Stop", exact=True)
    await expect(stop).to_be_enabled()
    await stop.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(stop).to_be_focused()
    fake.denied.add("PATCH /demo")
    await act(page, "Pause")
    await expect(page.get_by_role("alert").filter(has_text="Pause: 403")).to_contain_text('User "jane" cannot patch')
    assert fake.authors == []
    assert fake.clusters["demo"].spec.get("desiredState", "Running") == "Running"


async def test_a_denied_list_is_reported_and_read_again(page: Page, settings: Any, fake: Any) -> None:
    fake.denied.add("GET /megatroninferences")
    await page.goto(settings.url)
    await expect(page.get_by_role("alert")).to_contain_text('User "jane" cannot get')
    connection = page.get_by_role("status").first
    await expect(connection).to_have_text("not live; retrying")
    fake.denied.clear()
    await expect(page.get_by_role("row").filter(has_text="demo")).to_contain_text("Running")
    await expect(connection).to_have_text("live")
    await expect(page.get_by_role("alert")).to_be_hidden()


TABS = size(7, soak=20)
"""Browsers open six connections of HTTP/1.1 to a server."""


async def test_every_tab_is_live_follows_a_log_and_acts(page: Page, settings: Any, fake: Any) -> None:
    pages = [page, *[await page.context.new_page() for _ in range(TABS - 1)]]
    for number, each in enumerate(pages):
        await open_resource(each, settings)
        logs = each.get_by_role("region", name="Logs")
        await logs.get_by_label("Container").select_option(f"demo-engine-{number % 2}-0/engine")
        await logs.get_by_role("button", name="Follow").click()
        await expect(logs.get_by_label("Log")).to_contain_text("line 1 of")
    await act(pages[-1], "Pause")
    for each in pages:
        await expect(each.get_by_label("Resource", exact=True)).to_contain_text("desired Paused")
    assert len(fake.authors) == 1


async def test_a_stopped_command_is_shown_and_executes_no_verb_that_it_did_not_read(
    page: Page, command: Any, fake: Any
) -> None:
    other = await page.context.new_page()
    for each in (page, other):
        await open_resource(each, command)
        await expect(each.get_by_role("button", name="Pause", exact=True)).to_be_enabled()
    command.process.send_signal(signal.SIGSTOP)
    await act(other, "Stop")
    await other.close()
    await act(page, "Pause")
    alert = page.get_by_role("alert")
    await expect(alert.filter(has_text="Pause: not executed:")).to_be_visible()
    command.process.send_signal(signal.SIGCONT)
    connection = page.locator("#connection")
    await expect(connection).to_have_text("live")
    await act(page, "Suspend")
    await expect(page.get_by_text("Suspend: confirmed by every rank")).to_be_visible()
    command.process.send_signal(signal.SIGSTOP)
    await expect(connection).to_contain_text("disconnected from the dashboard's command")
    await act(page, "Run")
    await expect(alert.filter(has_text="Run: not executed: disconnected")).to_be_visible()
    assert len(fake.authors) == 1
    assert fake.clusters["demo"].state == "Suspended"


async def test_a_resource_opens_in_a_new_tab_and_from_a_bookmark(page: Page, settings: Any) -> None:
    await page.goto(settings.url)
    link = page.get_by_role("link", name="demo", exact=True)
    async with page.context.expect_page() as opened:
        await link.click(modifiers=["ControlOrMeta"])
    tab = await opened.value
    await expect(tab.get_by_label("Resource", exact=True)).to_contain_text("2/2 engines ready")
    bookmark = await page.context.new_page()
    await bookmark.goto(tab.url)
    await expect(bookmark.get_by_label("Resource", exact=True)).to_contain_text("2/2 engines ready")


async def test_a_page_without_a_valid_token_shows_why_and_a_new_token_reaches_open_tabs(
    page: Page, settings: Any
) -> None:
    rejection = "open the URL that the command printed"
    await page.goto(settings.url.partition("#")[0])
    await expect(page.locator("#connection")).to_contain_text(rejection)
    await page.goto(settings.url)
    await expect(page.locator("#connection")).to_have_text("live")
    await page.evaluate("localStorage.setItem('token', 'of an earlier start')")
    await page.reload()
    await expect(page.locator("#connection")).to_contain_text(rejection)
    tab = await page.context.new_page()
    await tab.goto(settings.url.partition("#")[0])
    await expect(tab.locator("#connection")).to_contain_text(rejection)
    await tab.goto(settings.url)
    for each in (page, tab):
        await expect(each.locator("#connection")).to_have_text("live")
        await expect(each.get_by_role("row").filter(has_text="demo")).to_contain_text("Running")


async def test_another_namespace_survives_a_reload_and_a_visit_of_a_resource(page: Page, settings: Any) -> None:
    await page.goto(settings.url)
    namespace, rows = page.get_by_label("Namespace"), page.get_by_role("row").filter(has_text="demo")
    await expect(rows).to_have_count(1)
    nothing = page.get_by_text("There is no MegatronInference in namespace other.")
    await expect(namespace).to_have_value("default")
    await namespace.fill("other")
    await namespace.press("Enter")
    await expect(nothing).to_be_visible()
    await expect(rows).to_have_count(0)
    await page.reload()
    await expect(nothing).to_be_visible()
    await expect(namespace).to_have_value("other")
    await page.goto(f"{settings.url.partition('#')[0]}#/default/demo")
    for leave in (page.get_by_role("link", name="← Resources"), page.get_by_role("link", name="Megatron")):
        await expect(page.get_by_label("Resource", exact=True)).to_contain_text("2/2 engines ready")
        await leave.click()
        await expect(nothing).to_be_visible()
        await page.go_back()
    await page.go_back()
    await expect(nothing).to_be_visible()
    bookmark = await page.context.new_page()
    await bookmark.goto(page.url)
    await expect(bookmark.get_by_text("There is no MegatronInference in namespace other.")).to_be_visible()
    await namespace.fill("")
    await namespace.press("Enter")
    await expect(rows).to_have_count(1)


async def test_an_address_that_is_none_breaks_nothing(page: Page, settings: Any) -> None:
    await page.goto(settings.url)
    resources = page.get_by_role("region", name="Resources")
    await expect(resources).to_be_visible()
    for address in ("#/%", "#/a/%E0%A4%A", "#/default/demo/more", "#/Bad/Name", "#/?namespace=%"):
        await page.evaluate("address => { location.hash = address }", address)
        await page.get_by_role("link", name="Megatron").click()
        await expect(resources).to_be_visible()


async def test_the_layout_on_every_screen(page: Page, settings: Any, fake: Any) -> None:
    fake.suffix = "x" * 200
    await page.goto(settings.url)
    await expect(page.get_by_role("row").filter(has_text="broken")).to_contain_text("CrashLooping")
    await page.evaluate("document.getElementById('context').textContent = 'arn:aws:eks:region:1:cluster/'.repeat(9)")
    await check_layout(page)
    await page.get_by_role("link", name="broken", exact=True).click()
    await expect(page.get_by_role("table", name="Engines")).to_contain_text("broken-engine-0")
    backgrounds = set()
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        backgrounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        await expect(page.locator("canvas")).to_have_count(3)
    assert len(backgrounds) == 2
    await page.get_by_text("Preview a change of the spec").click()
    logs = page.get_by_role("region", name="Logs")
    await logs.get_by_role("button", name="Follow").click()
    await expect(logs.get_by_label("Log")).to_contain_text("line 1 of")
    await check_layout(page)
    await page.get_by_role("button", name="Scale", exact=True).click()
    await check_layout(page)
    await page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    fake.holds = True
    fake.denied |= {"GET /proxy/metrics", "GET /events"}
    await page.get_by_role("link", name="Megatron").click()
    await page.get_by_role("link", name="demo", exact=True).click()
    await act(page, "Pause")
    await expect(page.get_by_role("status").filter(has_text="Pause:")).to_contain_text("1 of 2 ranks confirmed")
    fake.denied |= {"PATCH /demo"}
    await act(page, "Stop")
    await expect(page.get_by_role("alert").filter(has_text="Stop: 403")).to_be_visible()
    await check_layout(page)


async def test_characters_that_change_the_direction_are_escapes(page: Page, settings: Any, fake: Any) -> None:
    controls = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    escapes = "".join(f"\\u{ord(char):04x}" for char in controls)
    fake.suffix = controls
    await page.goto(settings.url)
    await expect(page.get_by_role("row").filter(has_text="demo")).to_contain_text(escapes)
    await page.get_by_role("link", name="demo", exact=True).click()
    await expect(page.get_by_label("Resource", exact=True)).to_contain_text(escapes)
    fake.clusters["demo"].patch(replicas=1)
    history = page.get_by_role("table", name="Conditions, Events and history")
    await expect(history.get_by_role("row").filter(has_text="Event").filter(has_text=escapes).first).to_be_visible()
    logs = page.get_by_role("region", name="Logs")
    await logs.get_by_label("Container").select_option("demo-engine-0-0/engine")
    await logs.get_by_role("button", name="Follow").click()
    await expect(logs.get_by_label("Log")).to_contain_text(f"engine{escapes}")
    await page.evaluate("address => { location.hash = address }", f"#/default/x{controls}")
    await expect(page.get_by_role("heading", name=f"default/x{escapes}")).to_be_visible()
    shown = await page.evaluate("document.documentElement.outerHTML + document.title")
    assert not set(controls) & set(shown)
