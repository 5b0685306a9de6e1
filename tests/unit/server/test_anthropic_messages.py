"""POST /v1/messages with Anthropic's client: blocks, streams, tools, thinking, formats, errors, token counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from megatron_runtime.client.rejection import RequestRejectedError

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}!{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}"
    "{{ m.tool_call_id or '' }};{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Look it up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Anthropic's package. Its import takes seconds, so the processes that run other files leave it out."""
    import anthropic

    return anthropic


@pytest.fixture
async def client(anthropic: Any) -> AsyncIterator[Any]:
    """Return a function that connects Anthropic's client to a server under test."""
    opened = []

    def connect(running: Any, *, key: str = "any") -> Any:
        opened.append(anthropic.AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0))
        return opened[-1]

    yield connect
    for each in opened:
        await each.close()


async def test_a_message_is_the_answer_of_the_chat(running: Any, client: Any, answer: str) -> None:
    chat = await running.openai.chat.completions.create(model="smollm2", messages=HI, temperature=0, max_tokens=100)
    messages = client(running).messages
    reply = await messages.create(model="smollm2", max_tokens=100, messages=HI, **GREEDY)
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", "smollm2", "end_turn")
    assert [block.text for block in reply.content] == [answer]
    first, second = running.backend.requests
    assert first[0] == second[0]
    assert first[1].serialize() == second[1].serialize()
    usage = reply.usage
    assert usage.cache_read_input_tokens == chat.usage.prompt_tokens_details.cached_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    counted = await messages.count_tokens(model="smollm2", messages=HI)
    assert counted.input_tokens == chat.usage.prompt_tokens
    cut = await messages.create(model="smollm2", max_tokens=3, messages=HI, **GREEDY)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = await messages.create(model="smollm2", max_tokens=100, messages=HI, **GREEDY, stop_sequences=["says"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "says")
    assert answer.startswith(stopped.content[0].text)


async def test_a_stream_adds_up_to_the_whole_message(start_with_template: Any, client: Any) -> None:
    running = await start_with_template(
        TEMPLATE, special=["<think>", "</think>"], reasoning_parser="think", tool_call_parser="hermes"
    )
    running.backend.answer = f"<think>Hm, so.</think>I look. {CALL}{CALL}"
    messages = client(running).messages
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 500, "messages": HI, **GREEDY, "tools": [WEATHER]}
    whole = await messages.create(**body)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert (whole.content[0].thinking, whole.content[1].text) == ("Hm, so.", "I look.")
    assert [block.input for block in whole.content[2:]] == [{"city": "Paris"}] * 2
    assert whole.content[2].id != whole.content[3].id

    async with messages.stream(**body) as stream:
        final = await stream.get_final_message()
    assert final.usage == whole.usage

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [{**block.model_dump(), "id": None} for block in message.content]

    assert without_ids(final) == without_ids(whole)
    events = [event async for event in await messages.create(**body, stream=True)]
    assert (events[0].type, events[-2].type, events[-1].type) == ("message_start", "message_delta", "message_stop")
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


async def test_the_client_reads_a_stream_whose_arguments_are_no_json(start_with_template: Any, client: Any) -> None:
    """It parses the arguments at each event, and would raise. The text of the model is a member of their object."""
    running = await start_with_template(TEMPLATE, tool_call_parser="hermes")
    written = '{"city": "Pa", "days": [1, 2 3]}'
    running.backend.answer = f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>'
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 200, "messages": HI, "tools": [WEATHER], **GREEDY}
    async with client(running).messages.stream(**body) as stream:
        (block,) = (await stream.get_final_message()).content
    assert (block.type, block.name) == ("tool_use", "weather")
    assert block.input == {"city": "Pa", "days": [1, 2], "arguments": written + "}\n"}
    whole = await client(running).messages.create(**body)
    assert whole.content[0].input == {"arguments": written + "}\n"}


async def test_blocks_are_accepted_back_and_results_answer_calls(start_with_template: Any, client: Any) -> None:
    running = await start_with_template(
        TEMPLATE, special=["<think>", "</think>"], reasoning_parser="think", tool_call_parser="hermes"
    )
    running.backend.answer = f"<think>Hm</think>I look. {CALL}"
    messages = client(running).messages
    shared: dict[str, Any] = {"model": "smollm2", "max_tokens": 500, **GREEDY, "tools": [WEATHER]}
    first = await messages.create(**shared, messages=HI, system="Be brief.")
    id_ = first.content[-1].id
    result = {"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": "sunny"}]}
    history = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    await messages.create(
        **shared,
        messages=history,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "disabled"},
    )
    expected = (
        f'weather!system:|Be brief.;user:|Hi;assistant:Hm|I look.[{id_} weather {{"city": "Paris"}}];tool:|sunny{id_};'
        "user:|And?;False"
    )
    assert running.tokenizer.decode(running.backend.requests[-1][0]) == expected


async def test_forced_calls_and_formats_become_structured_output(running: Any, client: Any) -> None:
    messages = client(running).messages
    shared: dict[str, Any] = {"model": "smollm2", "max_tokens": 100, "messages": HI, **GREEDY}
    running.backend.answer = '{"city": "Paris"}'
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        if choice["type"] == "any":
            running.backend.answer = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
        reply = await messages.create(**shared, tools=[WEATHER], tool_choice=choice)
        (block,) = reply.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Paris"})
        assert running.backend.requests[-1][1].structured_output["type"] == "json_schema"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    running.backend.answer = '{"a": 1}'
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    for answer, kind in (('{"a": 1}', "text"), (CALL, "tool_use")):
        running.backend.answer = answer
        reply = await messages.create(**shared, output_config=output, tools=[WEATHER])
        assert [block.type for block in reply.content] == [kind]
        assert running.backend.requests[-1][1].structured_output["type"] == "grammar"
    running.backend.answer = '{"a": 1}'
    reply = await messages.create(**shared, output_config=output)
    assert reply.content[0].text == '{"a": 1}'
    assert running.backend.requests[-1][1].structured_output == {
        "type": "json_schema",
        "value": {**schema, "additionalProperties": False},
    }


async def test_extensions_of_agents_are_accepted(start_with_template: Any) -> None:
    running = await start_with_template(TEMPLATE, tool_call_parser="hermes")
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    found = {"type": "search_result", "title": "R", "source": "u", "content": [{"type": "text", "text": "S"}]}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    parts = [{"type": "text", "text": "see"}, image, {"type": "tool_reference", "tool_name": "weather"}, document, pdf]
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": parts}]},
        {"role": "system", "content": [{"type": "text", "text": "reminder", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "compaction", "content": None},
                {"type": "server_tool_use", "id": "s", "name": "any", "input": {}},
                {"type": "any_tool_result", "tool_use_id": "s", "content": {}},
                {"type": "compaction", "content": "Earlier."},
            ],
        },
        {"role": "user", "content": [found, document, {"type": "text", "text": "c"}]},
    ]
    body = {
        "model": "smollm2",
        "max_tokens": 500,
        "temperature": 0,
        "system": None,
        "messages": history,
        "tools": [
            {**WEATHER, "defer_loading": True, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "max"},
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = await running.post(path, body)
        assert reply.status_code == 200, reply.text
    prompt = running.tokenizer.decode(running.backend.requests[-1][0])
    assert prompt == (
        "weather!user:|a;assistant:|[t1 weather {}];tool:|see\n[image]\n[tool_reference weather]\nT\nD\n"
        "[document]t1;system:|reminder;assistant:|Earlier.;user:|R\nu\nS\nT\nD\nc;True"
    )


async def test_a_late_system_message_is_text_of_the_user_where_the_template_rejects_it(
    start_with_template: Any,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    running = await start_with_template(template)
    history = [*HI, {"role": "system", "content": "reminder"}]
    reply = await running.post("/v1/messages", {"model": "smollm2", "max_tokens": 5, "messages": history})
    assert reply.status_code == 200, reply.text
    assert running.tokenizer.decode(running.backend.requests[-1][0]) == "user:Hi\n\nreminder;"


async def test_allowed_tools_limit_what_the_model_may_call(running: Any) -> None:
    running.backend.answer = '[{"name": "b", "arguments": {}}]'
    tools = [{**WEATHER, "name": name} for name in "ab"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "b"}]}
    body = {"model": "smollm2", "max_tokens": 50, "temperature": 0, "messages": HI, "tools": tools}
    reply = await running.post("/v1/messages", {**body, "tool_choice": choice})
    assert reply.json()["content"][0]["name"] == "b"
    (call,) = running.backend.requests[-1][1].structured_output["value"]["items"]["anyOf"]
    assert call["properties"]["name"] == {"const": "b"}


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_threads_are_rejected_so_that_the_client_sends_the_whole_conversation(
    running: Any, thread: dict[str, str]
) -> None:
    """The tool runner of Anthropic's SDK otherwise sends only the new messages of a conversation."""
    body = {"model": "smollm2", "max_tokens": 10, "messages": HI, "thread": thread}
    reply = await running.post("/v1/messages", body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "thread is not offered by this server: leave it out. The server keeps no answers" in error["message"]
    assert not running.backend.requests


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "'document'"),
        ({"tool_choice": {"type": "any"}}, "Invalid value for tool_choice: it forces a call"),
        ({"messages": []}, "messages"),
        (
            {
                "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "no function 'web_search'",
        ),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"mcp_servers": [{}]}, "not offered"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_not_offered_is_rejected_by_name(
    running: Any, client: Any, fields: dict[str, Any], phrase: str
) -> None:
    body = {"model": "smollm2", "max_tokens": 10, "messages": HI, **fields}
    reply = await running.post("/v1/messages", body)
    assert (reply.status_code, set(reply.json())) == (400, {"type", "error"})
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert phrase in error["message"]
    assert not running.backend.requests


async def test_errors_are_those_of_anthropics_client(
    anthropic: Any, running: Any, client: Any, start_with_keys: Any
) -> None:
    messages = client(running).messages
    with pytest.raises(anthropic.NotFoundError, match="smollm2"):
        await messages.create(model="other", max_tokens=10, messages=HI)
    running.backend.reject = RequestRejectedError(503, "the engines are stopped", 2.0)
    with pytest.raises(anthropic.APIStatusError) as raised:
        await messages.create(model="smollm2", max_tokens=10, messages=HI)
    assert raised.value.status_code == 503
    assert raised.value.type == "overloaded_error"
    assert raised.value.request_id is None or raised.value.request_id.startswith("req_")
    guarded = await start_with_keys("keys:\n- {name: a, key: secret, requestsPerMinute: 1}\n")
    with pytest.raises(anthropic.AuthenticationError):
        await client(guarded, key="wrong").messages.create(model="smollm2", max_tokens=10, messages=HI)
    messages = client(guarded, key="secret").messages
    await messages.create(model="smollm2", max_tokens=10, messages=HI, **GREEDY)
    with pytest.raises(anthropic.RateLimitError, match="Rate limit reached for the API key a"):
        await messages.create(model="smollm2", max_tokens=10, messages=HI)


async def test_a_stream_that_fails_ends_with_an_error_event(anthropic: Any, running: Any, client: Any) -> None:
    running.backend.failure = {"code": 500, "message": "the engine failed"}
    with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
        async for _ in await client(running).messages.create(
            model="smollm2", max_tokens=10, messages=HI, **GREEDY, stream=True
        ):
            pass
    reply = await running.post(
        "/v1/messages", {"model": "smollm2", "max_tokens": 10, "messages": HI, "temperature": 0, "stream": True}
    )
    assert reply.text.rstrip().splitlines()[-2] == "event: error"
    assert "[DONE]" not in reply.text
