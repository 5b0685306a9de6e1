"""Long prompts and chat templates that loop: other requests are served, and only processes that render may end.

tests/hostile shows that megabytes of text and tens of thousands of messages stall no stream.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from eventually import LONG_SECONDS, eventually
from machine import scaled

from megatron_runtime.process.fair_lanes import FREE_SECONDS
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.openai import prompts
from megatron_runtime.server.openai.bodies import BodyBudget, Lease
from megatron_runtime.server.openai.prompts import TextLanes
from megatron_runtime.tokenization import Tokenizer, chat_template

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def test_renderers_end_with_a_killed_server(served: Any) -> None:
    server = served.children()["server"]
    async with served.client() as client:
        messages = [{"role": "user", "content": "Hi"}]
        await client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=1)
    renderers = [child for child in server.children() if any("chat_sandbox" in part for part in child.cmdline())]
    assert renderers
    server.send_signal(signal.SIGKILL)

    async def are_gone() -> bool:
        return not any(renderer.is_running() for renderer in renderers)

    await eventually(are_gone, what="the renderers have ended")


@pytest.fixture
def quick_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", scaled(1))


@pytest.mark.usefixtures("quick_limit")
async def test_a_template_that_loops_over_one_conversation_fails_only_that_request(start_with_template: Any) -> None:
    running = await start_with_template("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + CHAT)
    looping = asyncio.create_task(running.chat("loop"))
    await eventually(_renders(2, looping), what="a renderer is busy", look_seconds=0.01)
    others = [await running.chat(f"Hi {number}") for number in range(4)]
    assert [reply.status_code for reply in others] == [200] * 4
    assert not looping.done()
    reply = await looping
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert f"it took longer than {scaled(1):g} s" in reply.json()["error"]["message"]
    assert (await running.chat("Hi")).status_code == 200
    assert (await running.http.get("/readyz")).status_code == 200


def _renderer_pids() -> list[int]:
    return [process.pid for process in chat_template._renderers.processes if process.pid is not None]


def _renders(count: int, task: asyncio.Task[Any]) -> Any:
    async def busy() -> bool:
        return task.done() or any(
            psutil.Process(pid).cpu_times().user > 0.3 for pid in _renderer_pids() if psutil.pid_exists(pid)
        )

    return busy


def test_idle_renderers_end_on_request_and_start_again(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    before = tokenizer.render_chat(messages)
    (*_, pid) = _renderer_pids()
    chat_template.end_idle_renderers()
    assert _renderer_pids() == []
    assert not psutil.pid_exists(pid)
    assert tokenizer.render_chat(messages) == before


async def test_a_template_that_always_loops_is_reported(
    start_with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    running = await start_with_template(LOOP + CHAT)
    for _ in range(2):
        reply = await running.chat("Hi")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "chat_template_unusable")
        assert "the model's chat template cannot render any conversation" in reply.json()["error"]["message"]
    assert (await running.http.get("/readyz")).status_code == 200
    assert (await running.post("/v1/completions", {"model": "smollm2", "prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "not " * 50_000 + "a }}",
        "{% if %}",
        "x" * (chat_template.MAX_TEMPLATE_CHARACTERS + 1),
        "{{ " + "9" * 300_000 + " ** 9 ** 9 }}",
    ],
    ids=["parentheses", "blocks", "operators", "syntax", "size", "number"],
)
async def test_a_template_that_does_not_compile_leaves_the_server_ready(
    template: str, start_with_template: Any
) -> None:
    running = await start_with_template(template)
    reply = await running.chat("Hi")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "chat_template_unusable")
    assert "the model's chat template" in reply.json()["error"]["message"]
    assert (await running.http.get("/readyz")).status_code == 200
    assert (await running.post("/v1/completions", {"model": "smollm2", "prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ '%99999999999d' % 1 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    ],
    ids=["range", "product", "width", "recursion", "doubling"],
)
async def test_a_template_that_builds_too_much_is_an_error_of_the_request(
    template: str, start_with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", LONG_SECONDS)  # the limit of memory ends it
    running = await start_with_template(template)
    before = psutil.Process().memory_info().rss
    reply = await running.chat("Hi")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert (await running.http.get("/readyz")).status_code == 200


async def test_a_prompt_that_cannot_fit_is_rejected_without_tokenization(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        tokenized.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    text = "1" * 9000
    messages = [{"role": "user", "content": text}]
    for path, body, param in (
        ("completions", {"prompt": text}, "prompt"),
        ("completions", {"prompt": ["Hi", text]}, "prompt[1]"),
        ("chat/completions", {"messages": messages}, "messages"),
        ("tokenize", {"prompt": text}, "prompt"),
        ("tokenize", {"messages": messages}, "messages"),
    ):
        error = (await running.post(f"/v1/{path}", {"model": "smollm2", **body})).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "the prompt alone has at least 90" in error["message"]
    assert set(tokenized) <= {"Hi"}


async def test_many_short_prompts_do_not_block_the_event_loop(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are long, so none of them is tokenized in the thread of the event loop."""
    threads: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    prompts = ["The river runs to the sea. " * 70] * 64
    reply = await running.post("/v1/completions", {"model": "smollm2", "prompt": prompts, "max_tokens": 1})
    assert reply.status_code == 200
    assert len(threads) >= len(prompts)
    assert threading.get_ident() not in threads


async def test_a_long_list_of_tokens_is_decoded(running: Any, tokenizer: Tokenizer) -> None:
    tokens = (tokenizer.encode("naïve 🦙 river ") * 4000)[:8000]
    reply = await running.post("/v1/detokenize", {"tokens": tokens})
    assert reply.json()["prompt"] == tokenizer.decode(tokens, skip_special=False)


class TestTextLanes:
    async def test_short_texts_do_not_wait_for_long_ones(self) -> None:
        lanes, release = TextLanes(), threading.Event()
        long = [asyncio.create_task(lanes.run("long", lease(), lambda: release.wait(LONG_SECONDS))) for _ in range(5)]
        assert await lanes.run("medium", lease(), lambda: "medium") == "medium"
        assert await lanes.run("render", lease(), lambda: "rendered") == "rendered"
        release.set()
        assert await asyncio.gather(*long) == [True] * 5
        lanes.close()

    async def test_tenants_take_turns_and_cancelled_work_is_removed(self) -> None:
        lanes, release = TextLanes(), threading.Event()
        done: list[str] = []
        held = asyncio.create_task(lanes.run("long", lease("a"), lambda: release.wait(LONG_SECONDS)))
        names = ["a1", "a2", "a3", "b1", "b2"]
        tasks = [asyncio.create_task(lanes.run("long", lease(n[0]), lambda n=n: done.append(n))) for n in names]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        release.set()
        await asyncio.gather(held, *tasks, return_exceptions=True)
        assert done == ["b1", "a1", "b2", "a3"]
        lanes.close()

    async def test_a_tenant_beyond_its_time_is_rejected_until_it_has_some_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prompts, "TEXT_SECONDS_PER_MINUTE", 1e-9)
        lanes = TextLanes()
        for tenant in ("", "other", "hostile"):
            await lanes.run("long", lease(tenant), lambda: time.sleep(2 * FREE_SECONDS))
        await lanes.run("render", lease(), lambda: None)
        with pytest.raises(ApiError) as raised:
            await lanes.run("render", lease("hostile"), lambda: None)
        assert (raised.value.status, raised.value.code) == (429, "rate_limit_exceeded")
        assert int(raised.value.headers["Retry-After"]) > 0
        lanes.close()

    async def test_work_that_waits_too_long_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompts, "MAX_WAIT_SECONDS", 0.05)
        lanes, release = TextLanes(), threading.Event()

        def work() -> None:
            release.wait(LONG_SECONDS)

        first = asyncio.create_task(lanes.run("long", lease(), work))
        for waiting in (first, asyncio.create_task(lanes.run("long", lease(), work))):
            with pytest.raises(ApiError) as raised:
                await waiting
            assert (raised.value.status, raised.value.retry_after_seconds) == (503, 1)
        release.set()
        lanes.close()


def lease(tenant: str = "") -> Lease:
    return Lease(BodyBudget(1), tenant)
