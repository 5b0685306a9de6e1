"""POST /v1/responses by OpenAI's own client: whole, streamed, with tools, formats, reasoning and history."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}!{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}"
    "{{ m.tool_call_id }};{% endfor %}"
)
FUNCTION: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


async def test_a_text_is_answered_as_by_chat(running: Any, answer: str) -> None:
    reply = await running.openai.responses.create(
        model="smollm2", temperature=0, instructions="Be brief.", input="Hi", max_output_tokens=100
    )
    assert (reply.status, reply.output_text, reply.error) == ("completed", answer, None)
    chat = await running.openai.chat.completions.create(
        model="smollm2",
        temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_tokens=100,
    )
    first, second = running.backend.requests
    assert first[0] == second[0]
    assert first[1].serialize() == second[1].serialize()
    found = (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens)
    assert found == (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)
    cut = await running.openai.responses.create(model="smollm2", temperature=0, input="Hi", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == (
        "incomplete",
        "max_output_tokens",
        "incomplete",
    )


async def test_a_stream_adds_up_to_the_whole_response(start_with_template: Any) -> None:
    running = await start_with_template(
        TEMPLATE, special=["<think>", "</think>"], reasoning_parser="think", tool_call_parser="hermes"
    )
    running.backend.answer = f"<think>Hm, so.</think>I look. {CALL}{CALL}"
    body: dict[str, Any] = {"model": "smollm2", "temperature": 0, "input": "Hi", "tools": [FUNCTION]}
    whole = await running.openai.responses.create(**body, metadata={"step": "1"})
    assert whole.metadata == {"step": "1"}
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in whole.output] == kinds
    assert whole.output[0].content[0].text == "Hm, so."
    assert whole.output_text == "I look."
    assert [json.loads(item.arguments) for item in whole.output[2:]] == [{"city": "Paris"}] * 2
    assert whole.output[2].call_id != whole.output[3].call_id
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Hm, so.") + 2

    events = [event async for event in await running.openai.responses.create(**body, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    arguments = [item.arguments for item in whole.output[2:]]
    assert texts == dict(enumerate(["Hm, so.", "I look.", *arguments]))
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert added == [item.type for item in done] == kinds
    assert [item.model_dump() for item in done] == [item.model_dump() for item in events[-1].response.output]

    raw = await running.post("/v1/responses", {**body, "stream": True})
    blocks = [block.split("\n") for block in raw.text.removesuffix("\n\n").split("\n\n")]
    assert [name for name, _ in blocks] == [f"event: {event.type}" for event in events]

    async with running.openai.responses.stream(**body) as stream:
        final = await stream.get_final_response()
    assert (final.output_text, len(final.output)) == ("I look.", 4)


async def test_a_stream_that_fails_ends_with_openais_events(running: Any) -> None:
    running.backend.answer = "So far"
    running.backend.failure = {"type": "Stopped", "message": "the engines were stopped", "code": 503}
    body = {"model": "smollm2", "temperature": 0, "input": "Hi", "stream": True}
    with pytest.raises(openai.APIError, match="the engines were stopped"):
        _ = [event async for event in await running.openai.responses.create(**body)]
    raw = await running.post("/v1/responses", body)
    events = [json.loads(line.removeprefix("data: ")) for line in raw.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error, failed = events[-2:]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert error["message"] == error["error"]["message"] == failed["response"]["error"]["message"]
    response = Response.model_validate(failed["response"], strict=True)
    assert (response.status, response.error.code) == ("failed", "server_error")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert [(item.status, item.content[0].text) for item in response.output] == [("incomplete", "".join(deltas))]
    assert deltas


async def test_output_items_are_accepted_back_as_input(start_with_template: Any) -> None:
    running = await start_with_template(
        TEMPLATE, special=["<think>", "</think>"], reasoning_parser="think", tool_call_parser="hermes"
    )
    running.backend.answer = f"<think>Hm</think>I look. {CALL}"
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    first = await running.openai.responses.create(model="smollm2", temperature=0, input=history, tools=[FUNCTION])
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"})
    await running.openai.responses.create(model="smollm2", temperature=0, input=history, tools=[FUNCTION])
    id_ = first.output[-1].call_id
    expected = f'weather!user:|Hi;assistant:Hm|I look.[{id_} weather {{"city": "Paris"}}];tool:|sunny{id_};'
    assert running.tokenizer.decode(running.backend.requests[-1][0]) == expected


async def test_formats_and_forced_calls_become_structured_output(running: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    running.backend.answer = '{"a": 1}'
    reply = await running.openai.responses.create(
        model="smollm2",
        temperature=0,
        input="Hi",
        text={"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}},
    )
    assert reply.output_text == '{"a": 1}'
    assert running.backend.requests[-1][1].structured_output == {"type": "json_schema", "value": schema}
    reply = await running.openai.responses.create(
        model="smollm2",
        temperature=0,
        input="Hi",
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "weather"},
    )
    (call,) = reply.output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"a": 1}')
    fields = {"tools": [FUNCTION], "text": {"format": {"type": "json_object"}}, "max_output_tokens": 99}
    for answer, kind in (('{"a": 1}', "message"), (CALL, "function_call")):
        running.backend.answer = answer
        reply = await running.openai.responses.create(model="smollm2", temperature=0, input="Hi", **fields)
        assert [item.type for item in reply.output] == [kind]
    assert running.backend.requests[-1][1].structured_output["type"] == "grammar"


@pytest.mark.parametrize(
    ("fields", "param", "phrase"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not offered"),
        ({"background": True}, "background", "not offered"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.schema", "needs a schema"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "'item_reference', which is not offered"),
        (
            {"input": [{"type": "additional_tools", "tools": [{"type": "function", "name": "a b"}]}]},
            "input",
            "item 0: Invalid value for tools[0].name",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "not 'input_image'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "tool_calls"),
        ({"input": []}, "input", "at least one item"),
    ],
)
async def test_what_is_not_offered_is_rejected_by_name(
    running: Any, fields: dict[str, Any], param: str, phrase: str
) -> None:
    reply = await running.post("/v1/responses", {"model": "smollm2", "input": "Hi", **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert phrase in error["message"]
    assert not running.backend.requests


AGENT_TOOLS: list[dict[str, Any]] = [
    FUNCTION,
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
]


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_tools_of_agents_are_functions_for_the_model_and_come_back_as_their_kind(
    start_with_template: Any,
) -> None:
    running = await start_with_template(TEMPLATE, tool_call_parser="hermes")
    patch = "*** Begin Patch\n+ä\n"
    running.backend.answer = call_of("mcp__files__read", {"path": "/a"}) + call_of("apply_patch", {"input": patch})
    body: dict[str, Any] = {
        "model": "smollm2",
        "temperature": 0,
        "input": "Hi",
        "tools": AGENT_TOOLS,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "extra_body": {"client_metadata": {"originator": "cli"}},
    }
    whole = await running.openai.responses.create(**body)
    prompt = running.tokenizer.decode(running.backend.requests[-1][0])
    assert prompt.startswith("weather!mcp__files__read!apply_patch!user:")
    read, edit = whole.output
    assert (read.type, read.namespace, read.name) == ("function_call", "mcp__files", "read")
    assert json.loads(read.arguments) == {"path": "/a"}
    assert (edit.type, edit.name, edit.input) == ("custom_tool_call", "apply_patch", patch)
    assert [tool.type for tool in whole.tools] == [tool["type"] for tool in AGENT_TOOLS]

    events = [event async for event in await running.openai.responses.create(**body, stream=True)]
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in deltas) == patch
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert (done.input, done.item_id) == (patch, deltas[0].item_id)
    assert [item.type for item in events[-1].response.output] == ["function_call", "custom_tool_call"]

    history = [
        {"role": "user", "content": "Hi"},
        *(item.model_dump(exclude_none=True) for item in whole.output),
        {"type": "function_call_output", "call_id": read.call_id, "output": [{"type": "input_text", "text": "data"}]},
        {"type": "custom_tool_call_output", "call_id": edit.call_id, "output": "done"},
    ]
    await running.openai.responses.create(**{**body, "input": history})
    prompt = running.tokenizer.decode(running.backend.requests[-1][0])
    assert f'[{read.call_id} mcp__files__read {{"path": "/a"}}]' in prompt
    assert f"[{edit.call_id} apply_patch {json.dumps({'input': patch}, ensure_ascii=False)}]" in prompt
    assert prompt.endswith(f"tool:|data{read.call_id};tool:|done{edit.call_id};")


async def test_tools_in_items_of_the_input_are_offered(start_with_template: Any) -> None:
    """Codex sends its tools in the items, also again in the history."""
    running = await start_with_template(TEMPLATE, tool_call_parser="hermes")
    running.backend.answer = call_of("functions__exec", {"input": "ls"}) + call_of("mcp__files__read", {})
    functions = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [functions, {"type": "web_search"}]},
        {"role": "user", "content": "Hi"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "files"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [AGENT_TOOLS[1], {"name": "x"}]},
        {"type": "additional_tools", "role": "developer", "tools": [functions]},
    ]
    reply = await running.openai.responses.create(model="smollm2", temperature=0, input=items, tools=[FUNCTION])
    prompt = running.tokenizer.decode(running.backend.requests[-1][0])
    assert prompt.startswith("weather!functions__exec!mcp__files__read!user:")
    execute, read = reply.output
    assert (execute.type, execute.namespace, execute.name, execute.input) == (
        "custom_tool_call",
        "functions",
        "exec",
        "ls",
    )
    assert (read.type, read.namespace, read.name) == ("function_call", "mcp__files", "read")


async def test_the_input_of_a_custom_tool_that_was_cut_is_what_the_model_wrote(running: Any) -> None:
    running.backend.answer = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Beg'
    reply = await running.openai.responses.create(model="smollm2", temperature=0, input="Hi", tools=AGENT_TOOLS)
    assert reply.output[0].input == '{"input": "*** Beg'


async def test_a_custom_tool_can_be_forced_and_its_input_is_a_string(running: Any) -> None:
    running.backend.answer = '{"input": "x"}'
    for choice, tools in (
        ({"type": "custom", "name": "apply_patch"}, AGENT_TOOLS),
        ({"type": "function", "namespace": "mcp__files", "name": "read"}, AGENT_TOOLS),
    ):
        reply = await running.openai.responses.create(
            model="smollm2", temperature=0, input="Hi", tools=tools, tool_choice=choice
        )
        assert reply.output[0].name == choice["name"]
    schema = running.backend.requests[0][1].structured_output["value"]
    assert schema["properties"] == {"input": {"type": "string"}}


async def test_items_of_agents_are_accepted_as_history(start_with_template: Any) -> None:
    running = await start_with_template(TEMPLATE)
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "tool_search_call", "call_id": "c2", "execution": "client", "arguments": {"query": "files"}},
        {"type": "tool_search_output", "call_id": "c2", "execution": "client", "tools": [{"name": "read"}]},
        {"type": "function_call", "call_id": "c3", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c3",
            "output": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "unknown", "text": "x"},
        {
            "type": "agent_message",
            "author": "/root",
            "recipient": "/root/child",
            "content": [
                {"type": "input_text", "text": "Task:"},
                {"type": "encrypted_content", "encrypted_content": "Go"},
            ],
        },
    ]
    reply = await running.post("/v1/responses", {"model": "smollm2", "input": items, "temperature": 0, "other": 1})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "other, input.unknown"
    prompt = running.tokenizer.decode(running.backend.requests[-1][0])
    assert '[c1 local_shell {"command": ["ls"]}];tool:|a.txtc1;' in prompt
    assert '[c2 tool_search {"query": "files"}];tool:|[{"name": "read"}]c2;' in prompt
    assert prompt.endswith("tool:|see\n[image]c3;user:|Task:Go;")


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["responses", "chat"])
async def test_allowed_tools_limit_what_the_model_may_call(running: Any, route: str, mode: str) -> None:
    if mode == "required":
        running.backend.answer = '[{"name": "b", "arguments": {}}]'
    if route == "chat":
        tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in "abc"]
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}
        choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": allowed}
        reply = await running.chat(tools=tools, tool_choice=choice)
    else:
        tools = [{"type": "function", "name": name} for name in "abc"]
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "b"}]}
        body = {"model": "smollm2", "temperature": 0, "input": "Hi", "tools": tools, "tool_choice": choice}
        reply = await running.post("/v1/responses", body)
    assert reply.status_code == 200, reply.text
    tokens, params = running.backend.requests[-1]
    described = running.tokenizer.decode(tokens)
    assert '"name": "b"' in described
    assert '"name": "a"' not in described
    assert (params.structured_output is not None) == (mode == "required")


async def test_allowed_tools_that_do_not_exist_cannot_be_required(running: Any) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "x"}]}
    tools = [{"type": "function", "function": {"name": "a"}}]
    reply = await running.chat(tools=tools, tool_choice=choice)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
