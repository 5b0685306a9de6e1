"""POST /v1/responses by OpenAI's own client: whole, streamed, with tools, formats, reasoning and history."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
    whole = await running.openai.responses.create(**body)
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

    async with running.openai.responses.stream(**body) as stream:
        final = await stream.get_final_response()
    assert (final.output_text, len(final.output)) == ("I look.", 4)


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


@pytest.mark.parametrize(
    ("fields", "param", "phrase"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not offered"),
        ({"background": True}, "background", "not offered"),
        ({"tools": [{"type": "web_search"}]}, "tools", "use type 'function'"),
        ({"input": [{"type": "image_generation_call"}]}, "input", "use message, reasoning, function_call"),
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
