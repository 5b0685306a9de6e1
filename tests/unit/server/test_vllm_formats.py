"""The server with vLLM's renderer and parsers in other processes, which may be killed. vLLM is a fake package here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually

from megatron_runtime.server.formats.chat_format import AnswerRequest, ChatFormat, NativeChatFormat
from megatron_runtime.server.formats.vllm_format import VllmChatFormat, chat_format_of
from megatron_runtime.server.formats.vllm_parsers import MODEL_TYPES, Parsers, parsers_of
from megatron_runtime.tokenization import load_tokenizer

FAKE = Path(__file__).parents[1] / "vllm/fake_formats"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ANSWER = "think[Well, hm.]Both: call[add] and call[sub]."
VLLM_ID = r"chatcmpl-tool-[0-9a-f]{16}"
SETTINGS = {"tool_call_parser": "fake_calls", "reasoning_parser": "fake_thoughts"}


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKE))


@pytest.fixture
def model(tmp_path: Path, tokenizer_files: Path) -> Path:
    """A directory of files that vLLM could read, with the built-in model's tokenizer."""
    directory = shutil.copytree(tokenizer_files, tmp_path / "model")
    (directory / "config.json").write_text('{"model_type": "fake"}')
    return directory


MakeFormat = Callable[..., Awaitable[ChatFormat]]


@pytest.fixture
async def make_format(model: Path) -> AsyncIterator[MakeFormat]:
    made: list[ChatFormat] = []

    async def make(**settings: str) -> ChatFormat:
        found = await chat_format_of(
            load_tokenizer(str(model)), backend="vllm", model=str(model), **{**SETTINGS, **settings}
        )
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


@pytest.fixture
async def served(fake_vllm: None, make_format: MakeFormat, start: Any) -> Any:
    """A server with vLLM's formats, whose engine answers with `answer`."""
    running = await start(chat_format=await make_format())
    running.backend.answer = ANSWER
    return running


def message_of(body: dict[str, Any]) -> dict[str, Any]:
    message = body["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return {"text": message["content"], "reasoning": message.get("reasoning"), "calls": calls}


EXPECTED = {
    "text": "Both:  and .",
    "reasoning": "Well, hm.",
    "calls": [("add", '{"a": 1}'), ("sub", '{"a": 1}')],
}


async def streamed(running: Any, text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """Return the message that a client collects from a stream, and `error` if it ends with one."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "error": None}
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0}
    async with running.http.stream("POST", "/v1/chat/completions", json={**body, **fields}) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                found["error"] = event["error"]
                continue
            delta = event["choices"][0]["delta"]
            found["text"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append([call["function"]["name"], ""])
                found["calls"][-1][1] += call["function"]["arguments"]
    found["calls"] = [tuple(call) for call in found["calls"]]
    return found


async def test_answers_are_parsed_by_vllm_streamed_and_whole(served: Any) -> None:
    whole = await served.chat(tools=TOOLS)
    assert message_of(whole.json()) == EXPECTED
    assert whole.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert await streamed(served, tools=TOOLS) == {**EXPECTED, "error": None}
    prompt, _ = served.backend.requests[-1]
    assert bytes(prompt).endswith(b"user: Hi\nassistant: ")
    (card,) = (await served.http.get("/v1/models")).json()["data"]
    assert (card["tool_call_format"], card["reasoning_format"]) == ("vllm:fake_calls", "vllm:fake_thoughts")
    assert served.backend.formats.tool_calls == "vllm:fake_calls"


async def test_the_other_routes_are_parsed_by_vllm_too(served: Any) -> None:
    request = {"model": "smollm2", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    message = (await served.post("/v1/messages", {**request, "temperature": 0})).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    response = (await served.post("/v1/responses", {"model": "smollm2", "input": "Hi", "temperature": 0})).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]


async def test_several_choices_are_parsed_apart(served: Any) -> None:
    answer = await served.openai.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Hi"}], n=5, temperature=0, tools=TOOLS
    )
    for choice in answer.choices:
        assert choice.message.content == EXPECTED["text"]
        assert [call.function.name for call in choice.message.tool_calls] == ["add", "sub"]


async def test_a_forced_call_is_read_after_its_reasoning(served: Any) -> None:
    served.backend.answer = 'think[Hm.][{"name": "add", "arguments": {}}]'
    answer = (await served.chat(tools=TOOLS, tool_choice="required")).json()
    assert message_of(answer)["calls"] == [("add", "{}")]
    assert message_of(answer)["reasoning"] == "Hm."
    assert re.fullmatch(VLLM_ID, answer["choices"][0]["message"]["tool_calls"][0]["id"])


async def test_calls_or_json_are_read_by_the_parser_that_fits_the_grammar(served: Any) -> None:
    fields = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    for answer, calls in (
        ('{"a": "call[add]"}', []),
        ('<tool_call>{"name": "add", "arguments": {"b": 2}}</tool_call>', [("add", '{"b": 2}')]),
    ):
        served.backend.answer = answer
        whole = (await served.chat(**fields)).json()
        assert message_of(whole) == {"text": None if calls else answer, "reasoning": None, "calls": calls}
        assert (await streamed(served, **fields))["calls"] == calls
    assert re.fullmatch(VLLM_ID, whole["choices"][0]["message"]["tool_calls"][0]["id"])


async def test_calls_have_the_ids_that_vllm_gives_them(served: Any) -> None:
    """vLLM's server makes an id if the parser gives none. The ids are accepted in the next request."""
    message = (await served.chat(tools=TOOLS)).json()["choices"][0]["message"]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first == "id-of-add"
    assert re.fullmatch(VLLM_ID, second)
    results = [{"role": "tool", "tool_call_id": id_, "content": "1"} for id_ in (first, second)]
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}, message, *results], "tools": TOOLS}
    assert (await served.post("/v1/chat/completions", body)).status_code == 200
    request = {"model": "smollm2", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    blocks = (await served.post("/v1/messages", request)).json()["content"]
    assert blocks[2]["id"] == "id-of-add"
    items = (await served.post("/v1/responses", {"model": "smollm2", "input": "Hi", "temperature": 0})).json()["output"]
    assert items[2]["call_id"] == "id-of-add"


async def test_ids_of_kimi_are_numbers_in_the_conversation(
    fake_vllm: None, make_format: MakeFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_format = await make_format()
    monkeypatch.setattr(chat_format, "_numbers_calls", True)
    answer = chat_format.answer(AnswerRequest(prompt=[1], tools={"add": {}}, earlier_calls=3))
    assert [answer.call_id("add", number) for number in (0, 1)] == ["functions.add:3", "functions.add:4"]


async def test_a_worker_that_dies_once_loses_and_repeats_nothing(served: Any, tmp_path: Path) -> None:
    served.backend.answer = f"think[Hm.]a ONCE({tmp_path / 'parse'}) call[add] b"
    expected = f"a ONCE({tmp_path / 'parse'})  b"
    found = await streamed(served, f"ONCE({tmp_path / 'render'})", tools=TOOLS)
    assert (tmp_path / "parse").exists()
    assert (tmp_path / "render").exists()
    assert found == {"text": expected, "reasoning": "Hm.", "calls": [("add", '{"a": 1}')], "error": None}


async def test_a_killed_worker_is_replaced_in_mid_stream(served: Any) -> None:
    served.backend.free_tokens = 9
    served.backend.gate.clear()
    streams = [asyncio.create_task(streamed(served, tools=TOOLS)) for _ in range(4)]
    await served.backend.until(open_requests=4)
    workers = served.service.chat_format._processes.parsers

    async def are_idle() -> bool:
        return all(worker.pid is not None and not worker.load for worker in workers)

    await eventually(are_idle, what="each worker has parsed the pieces so far")
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    served.backend.gate.set()
    assert await asyncio.gather(*streams) == [{**EXPECTED, "error": None}] * 4


async def test_the_parent_is_started_again(served: Any) -> None:
    processes = served.service.chat_format._processes
    assert message_of((await served.chat(tools=TOOLS)).json()) == EXPECTED
    for child in psutil.Process(processes._process.pid).children():
        child.kill()
    processes._process.kill()
    assert message_of((await served.chat(tools=TOOLS)).json()) == EXPECTED


async def test_a_request_that_kills_two_workers_fails_alone(served: Any) -> None:
    before = await served.chat("CRASH")
    assert before.status_code == 500
    assert "it crashed two processes" in before.json()["error"]["message"]
    served.backend.free_tokens = 4
    served.backend.gate.clear()
    innocent = [asyncio.create_task(streamed(served, tools=TOOLS)) for _ in range(3)]
    await served.backend.until(open_requests=3)
    served.backend.answer = "a CRASH b"
    guilty = [asyncio.create_task(streamed(served)), asyncio.create_task(served.chat())]
    await served.backend.until(open_requests=5)
    served.backend.gate.set()
    stream, whole = await asyncio.gather(*guilty)
    assert stream["error"]["code"] == "answer_not_parsed"
    assert "it crashed two processes" in stream["error"]["message"]
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "answer_not_parsed")
    assert await asyncio.gather(*innocent) == [{**EXPECTED, "error": None}] * 3


async def test_an_error_of_a_parser_is_an_error_of_its_request(served: Any) -> None:
    served.backend.answer = "BROKEN"
    answer = await served.chat()
    assert answer.status_code == 500
    assert "LookupError: no such construct" in answer.json()["error"]["message"]


async def test_a_conversation_that_vllm_rejects_is_rejected(served: Any) -> None:
    answer = await served.chat("REJECT")
    assert answer.status_code == 400
    assert "the template rejects it" in answer.json()["error"]["message"]


async def test_the_text_before_the_end_of_a_continued_message_is_the_prompt(served: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The capital"}]
    body = {"model": "smollm2", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await served.post("/v1/chat/completions", body)).status_code == 200
    prompt, _ = served.backend.requests[-1]
    assert served.tokenizer.decode(prompt) == "user: Hi\nassistant: The capital"


async def test_processes_end_with_the_format(fake_vllm: None, make_format: MakeFormat) -> None:
    chat_format = await make_format()
    assert isinstance(chat_format, VllmChatFormat)
    answer = chat_format.answer(AnswerRequest(prompt=[1], tools={"add": {}}))
    await answer.async_parser().feed("a", [1], is_last=False)
    parent = psutil.Process(chat_format._processes._process.pid)
    workers = parent.children()
    assert workers
    chat_format.close()
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (len(workers), [])
    assert not parent.is_running()


async def test_without_vllm_the_formats_are_ours(make_format: MakeFormat, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat_format = await make_format(tool_call_parser="auto", reasoning_parser="auto")
    assert isinstance(chat_format, NativeChatFormat)
    assert "the package vllm is not installed" in caplog.text
    assert chat_format.answer(AnswerRequest(prompt=[1], tools={})).async_parser() is None
    with pytest.raises(ValueError, match="no tool-call parser 'fake_calls': use auto, none or one of hermes"):
        await make_format()


async def test_a_vllm_without_the_interface_is_not_used(
    make_format: MakeFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(FAKE, tmp_path / "old")
    (tmp_path / "old/vllm/parser.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    with caplog.at_level(logging.WARNING):
        chat_format = await make_format(tool_call_parser="auto", reasoning_parser="auto")
    assert isinstance(chat_format, NativeChatFormat)
    assert "No module named 'vllm.parser'" in caplog.text


async def test_an_unknown_name_is_rejected_with_those_of_the_installed_vllm(
    fake_vllm: None, make_format: MakeFormat
) -> None:
    with pytest.raises(ValueError, match=r"'nosuch' is not a parser of the installed vLLM: .* fake_calls, hermes"):
        await make_format(tool_call_parser="nosuch")


async def test_where_vllm_lacks_a_parser_ours_read_the_answers(fake_vllm: None, make_format: MakeFormat) -> None:
    chat_format = await make_format(tool_call_parser="kimi_k2", reasoning_parser="none")
    assert chat_format.tool_format == "kimi_k2"
    answer = chat_format.answer(AnswerRequest(prompt=[1], tools={"add": {}}))
    assert answer.async_parser() is None
    assert answer.parser() is not None


def test_the_type_of_a_model_chooses_between_formats_that_render_alike() -> None:
    tools = {name for parsers in MODEL_TYPES.values() for name in parsers if name} | {"hermes", "qwen3_coder"}
    of = partial(parsers_of, is_open=False, installed=(tools, tools | {"deepseek_r1"}))
    assert of("qwen3", "hermes", "think") == Parsers("hermes", "qwen3")
    assert of("granitemoehybrid", "hermes", None).tools == "granite4"
    assert of("qwen3_moe", "qwen3_coder", None) == Parsers("qwen3_coder", None)
    assert of("step3p5", "qwen3_coder", "think") == Parsers("step3p5", "step3p5")
    assert of("llama", "hermes", "think", is_open=True) == Parsers("hermes", "deepseek_r1")
    assert of("llama", "hermes", "think") == Parsers("hermes", None)  # its answers may have no reasoning
    assert of("longcat_flash", None, None).tools == "longcat"
    assert of("llama", "functionary_v31", None) == Parsers(None, None)
    assert of("qwen3", "hermes", "think", installed=((), ())) == Parsers(None, None)
