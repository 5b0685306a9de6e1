"""What a route returned is accepted by that route as history: messages, output items, content blocks and token ids.

The answers are random: cut, empty, malformed, with calls whose arguments are no JSON object. The history is what the
server wrote, what OpenAI's and Anthropic's libraries make of it, and what these libraries assemble from a stream.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jiter
import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import ParsedResponseOutputItem, ResponseOutputItem
from pydantic import TypeAdapter
from soak import size
from vocabularies import sentencepiece_like

from megatron_runtime.tokenization import load_tokenizer

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATES = {
    "as text": "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}<end>{% endfor %}",
    "objects only": (
        "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% for name, value in "
        "call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}<end>{% endfor %}"
    ),
    "short ids, alternating": (
        "{{ tools }}{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role == ns.last and m.role != 'tool' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.last = m.role %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "{{ call.function.arguments | tojson }}{% endfor %}{% if m.tool_call_id is defined and m.tool_call_id | length "
        "!= 9 %}{{ raise_exception('id') }}{% endif %}<end>{% endfor %}"
    ),
}
ARGUMENTS = [
    '{"city": "Oslo"}',
    "{}",
    "",
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": "\\ud83d"}',
    '{"a": "\\u0000"}',
    "{'a': 1}",
    '["Oslo"]',
    "null",
    '"text"',
    '"{\\"a\\": \\"\\\\ud83d\\"}"',
    '"{\\"a\\": \\"\ud83d\\"}"'.encode(errors="backslashreplace").decode(),
    '{"a":' * 60 + "1" + "}" * 60,
    '{"a":' * 300 + "1" + "}" * 300,
    '{"a": "naïve 東京',
]
NAMES = ["time", "no tool", "f" * 300, "\\ud83d", "東京", ""]
TOOL = {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}
ROUNDS = size(25, soak=400)


def answer_of(draw: random.Random) -> str:
    """An answer as a model may write it, at its best and at its worst."""

    def call() -> str:
        name, arguments = draw.choice(NAMES[:1] * 4 + NAMES), draw.choice(ARGUMENTS)
        end = draw.choice(["\n</tool_call>", "\n</tool_call>", "", "}"])
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}{end}'

    thought = draw.choice(["", "", "Hm</think>", "Hm\n\n</think>\n\n", "<think>Hm</think>", "Hm", "</think></think>"])
    parts = [
        draw.choice(["", " ", "Yes. 🦙", call(), call(), draw.choice(ARGUMENTS)])
        for _ in range(draw.choice([0, 1, 2, 4]))
    ]
    return thought + "".join(parts)


def tokens_of(tokenizer: Any, text: str, draw: random.Random) -> list[int]:
    """The tokens of an answer, which may end within a character."""
    tokens = tokenizer.encode(text)
    return tokens[: draw.randrange(len(tokens) + 1)] if draw.random() < 0.3 else tokens


async def events_of(running: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await running.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


# --- one answer of each route, as history ---------------------------------------------------------------------------


def chat_deltas(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events:
        for name, value in event["choices"][0]["delta"].items():
            if name == "tool_calls":
                for part in value:
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append(part)
                    else:
                        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            elif isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
    return message


async def chat(running: Any, history: list[Any], fields: dict[str, Any], draw: random.Random) -> list[Any]:
    tools = [{"type": "function", "function": TOOL}]
    body = {"model": "smollm2", "messages": history, "tools": tools, "return_tokenized_data": True, **fields}
    kind = draw.randrange(4)
    if kind == 0:
        message = chat_deltas(await events_of(running, "/v1/chat/completions", body))
    else:
        reply = await running.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        types = (ChatCompletionMessage, ParsedChatCompletionMessage)
        message = message if kind == 1 else types[kind - 2].model_validate(message).model_dump()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": draw.choice(["ok", "", []])}
        for call in message.get("tool_calls") or ()
    ]
    return [message, *results]


async def responses(running: Any, history: list[Any], fields: dict[str, Any], draw: random.Random) -> list[Any]:
    tools = [{"type": "function", **TOOL}]
    body = {"model": "smollm2", "input": history, "tools": tools, **fields}
    body["max_output_tokens"] = body.pop("max_tokens")
    kind = draw.randrange(5)
    if kind == 0:
        items = (await events_of(running, "/v1/responses", body))[-1]["response"]["output"]
    elif kind == 1:
        events = await events_of(running, "/v1/responses", body)
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    else:
        reply = await running.post("/v1/responses", body)
        assert reply.status_code == 200, reply.text
        items = reply.json()["output"]
        if kind > 2:
            adapter: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem if kind == 3 else ParsedResponseOutputItem)
            items = [adapter.validate_python(item).model_dump() for item in items]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
        if item["type"] == "function_call"
    ]
    return [*items, *results]


BLOCK_FIELDS = {
    "text": {"citations": None, "parsed_output": None},
    "thinking": {"signature": ""},
    "tool_use": {"caller": None, "toolset_name": None},
}
"""What anthropic 2.14 adds to the blocks that it read."""


async def messages(running: Any, history: list[Any], fields: dict[str, Any], draw: random.Random) -> list[Any]:
    tools = [{"name": "time", "input_schema": TOOL["parameters"]}]
    body = {"model": "smollm2", "messages": history, "tools": tools, **fields}
    kind = draw.randrange(3)
    if kind == 0:
        message: dict[str, Any] = {}
        texts: list[str] = []
        for event in await events_of(running, "/v1/messages", body):
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(event["content_block"])
                    texts = []
                case "content_block_delta":
                    block, (value,) = message["content"][-1], (v for k, v in event["delta"].items() if k != "type")
                    texts.append(value)
                    if block["type"] != "tool_use":
                        block[block["type"]] += value
                    else:
                        try:
                            block["input"] = jiter.from_json("".join(texts).encode(), partial_mode=True)
                            json.dumps(block["input"], allow_nan=False)
                        except ValueError:  # the library raises it
                            block["input"] = {}
    else:
        reply = await running.post("/v1/messages", body)
        assert reply.status_code == 200, reply.text
        message = reply.json()
    content = [{**block, **BLOCK_FIELDS[block["type"]]} if kind == 1 else block for block in message["content"]]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": draw.choice(["ok", "", []])}
        for block in content
        if block["type"] == "tool_use"
    ]
    turn = {**message, "content": content} if draw.random() < 0.3 else {"role": "assistant", "content": content}
    return [turn, *([{"role": "user", "content": results}] if results else [])]


ROUTES: dict[str, Callable[..., Any]] = {"chat": chat, "responses": responses, "messages": messages}


@pytest.mark.parametrize(
    ("route", "template"), size([*zip(ROUTES, TEMPLATES, strict=True)], soak=[*product(ROUTES, TEMPLATES)])
)
async def test_every_answer_is_accepted_as_history(start_with_template: Any, route: str, template: str) -> None:
    running = await start_with_template(
        TEMPLATES[template],
        special=MARKERS,
        reasoning_parser="think",
        tool_call_parser="hermes",
        max_sequence_length=1 << 20,
    )
    calls = 0
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        history: list[Any] = []
        for _ in range(3):
            running.backend.answer = tokens_of(running.tokenizer, answer_of(draw), draw)
            if not history or history[-1].get("role") != "user":
                history.append({"role": "user", "content": "Hi"})
            fields: dict[str, Any] = {"temperature": 0, "max_tokens": draw.choice([1, 5, *[1 << 16] * 6])}
            if draw.random() < 0.1 and route != "messages":
                fields["tool_choice"] = "required"
            try:
                history += await ROUTES[route](running, history, fields, draw)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, history {json.dumps(history)[:4000]}") from error
        calls += json.dumps(history).count('"arguments": "') + json.dumps(history).count('"tool_use"')
    assert calls > ROUNDS / 4, "the history had few calls"


async def test_the_tokens_of_an_answer_are_accepted_as_history(start_with_template: Any) -> None:
    """Those of completions as a prompt, and those of a chat with its message, whatever the answer's end."""
    running = await start_with_template(TEMPLATES["as text"], special=MARKERS)
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        running.backend.answer = tokens_of(running.tokenizer, answer_of(draw), draw)
        body = {"temperature": 0, "max_tokens": draw.choice([1, 9, 4096])}
        prompt = [5, 6]
        reply = (await running.post("/v1/completions", {**body, "prompt": prompt, "return_token_ids": True})).json()
        prompt += reply["choices"][0]["token_ids"]
        again = await running.post("/v1/completions", {**body, "prompt": prompt, "echo": True})
        assert again.status_code == 200, again.text
        detokenized = await running.post("/v1/detokenize", {"tokens": prompt})
        assert detokenized.status_code == 200
        history = [{"role": "user", "content": "Hi"}]
        chat_body = {**body, "model": "smollm2", "prevent_retokenization": True}
        first = await running.post("/v1/chat/completions", {**chat_body, "messages": history})
        history += [first.json()["choices"][0]["message"], *history]
        second = await running.post("/v1/chat/completions", {**chat_body, "messages": history})
        assert second.status_code == 200, second.text
        continued = {**chat_body, "messages": history[:-1], "continue_final_message": True}
        third = await running.post("/v1/chat/completions", continued)
        message = history[1]
        assert third.status_code == 200, third.text
        expected = [*message["prompt_token_ids"], *message["generation_token_ids"]]
        expected = expected[:-1] if expected[-1] in running.tokenizer.eos_ids else expected
        assert running.backend.requests[-1][0] == expected


ASSISTANT = [
    {"content": ""},
    {"content": None},
    {},
    {"content": []},
    {"content": None, "tool_calls": []},
    {"content": None, "tool_calls": None, "function_call": None, "audio": None, "annotations": None},
    {"content": None, "refusal": "I cannot."},
    {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    {"content": "x", "reasoning": "Hm", "reasoning_details": [{"type": "reasoning.text"}]},
    {"content": "x", "reasoning": {"effort": "low"}},
    {"content": "x", "tool_calls": [{"id": "a", "function": {"name": "f", "parsed_arguments": None}, "index": 0}]},
]


async def test_the_content_of_an_answer_may_be_missing(start_with_template: Any) -> None:
    running = await start_with_template(TEMPLATES["as text"])
    user = {"role": "user", "content": "Hi"}
    for fields in ASSISTANT:
        body = {"model": "smollm2", "messages": [user, {"role": "assistant", **fields}, user], "max_tokens": 1}
        reply = await running.post("/v1/chat/completions", body)
        assert reply.status_code == 200, (fields, reply.text)
        prompt = running.tokenizer.decode(running.backend.requests[-1][0])
        assert ("I cannot." in prompt) == ("I cannot." in str(fields))
        assert ("Hm" in prompt) == ("Hm" in str(fields))
    for content in ({}, {"content": None}, {"content": []}, {"content": ""}):
        body = {"model": "smollm2", "messages": [user, {"role": "assistant", **content}, user], "max_tokens": 1}
        assert (await running.post("/v1/messages", body)).status_code == 200
    redacted = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]
    body["messages"][1] = {"role": "assistant", "content": redacted}
    assert (await running.post("/v1/messages", body)).status_code == 200
    for item in (
        {"type": "message", "role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"},
    ):
        reply = await running.post("/v1/responses", {"model": "smollm2", "input": [user, item, user]})
        assert reply.status_code == 200, (item, reply.text)
    rejected = await running.post("/v1/responses", {"input": [{"role": "assistant", "content": [{"type": "image"}]}]})
    assert rejected.status_code == 400


async def test_arguments_that_are_no_object_reach_the_template_as_text(start_with_template: Any) -> None:
    template = (
        "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments is mapping }}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    running = await start_with_template(template)
    for arguments, text in (
        ('{"a": 1}', "True{'a': 1}"),
        ('{"a": ', 'False{"a": '),
        ('{"a": NaN}', 'False{"a": NaN}'),
        ('{"a": 1e999}', 'False{"a": 1e999}'),
        ('["x"]', 'False["x"]'),
        ("", "True{}"),
        (None, "True{}"),
        ({"a": 1}, "True{'a': 1}"),
    ):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
        reply = await running.post("/v1/chat/completions", {"model": "smollm2", "messages": history, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        assert text in running.tokenizer.decode(running.backend.requests[-1][0])


async def test_tokens_beyond_the_vocabulary_are_accepted_as_the_model_has_them(start: Any, tmp_path: Path) -> None:
    """The logits of a model are often wider than its vocabulary."""
    backend = sentencepiece_like("strips one space")
    backend.save(str(tmp_path / "tokenizer.json"))
    size_ = backend.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size_ + 64}))
    running = await start(load_tokenizer(str(tmp_path)))
    for token, status in ((size_ + 63, 200), (size_ + 64, 400)):
        reply = await running.post("/v1/completions", {"prompt": [5, token, 6], "max_tokens": 0, "echo": True})
        assert reply.status_code == status, reply.text
        assert (await running.post("/v1/detokenize", {"tokens": [token]})).status_code == status
