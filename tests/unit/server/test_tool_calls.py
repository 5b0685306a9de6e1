"""Tools of a chat request: described to the model, calls returned, calls forced by structured output."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from megatron_runtime.server.formats import call_grammars

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}, "$defs": {"name": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
MESSAGES = [{"role": "user", "content": "How is it in Paris?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🗼"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "temperature": 0, "messages": MESSAGES, "tools": TOOLS, **fields}


async def test_calls_are_returned_with_the_text_before_them(running: Any) -> None:
    running.backend.answer = CALLS
    reply = await running.openai.chat.completions.create(**request())
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    found = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("function", "weather", {"city": "Paris 🗼"}), ("function", "time", {})]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)


async def test_streamed_calls_have_one_name_one_id_and_arguments_in_parts(running: Any) -> None:
    running.backend.answer = CALLS
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    pieces: dict[int, list[str]] = {}
    content, reasons = "", []
    async for chunk in await running.openai.chat.completions.create(**request(), stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                assert call.index not in names
                names[call.index], ids[call.index] = call.function.name, call.id
            else:
                assert call.id is None
            pieces.setdefault(call.index, []).append(call.function.arguments)
    assert (content, names, reasons[-1]) == ("Let me see.", {0: "weather", 1: "time"}, "tool_calls")
    assert len(set(ids.values())) == 2
    assert len(pieces[0]) > 4
    assert json.loads("".join(pieces[0])) == {"city": "Paris 🗼"}
    assert json.loads("".join(pieces[1])) == {}


async def test_without_parallel_tool_calls_only_the_first_call_is_returned(running: Any) -> None:
    running.backend.answer = CALLS
    reply = await running.openai.chat.completions.create(**request(parallel_tool_calls=False))
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["weather"]
    stream = await running.openai.chat.completions.create(**request(parallel_tool_calls=False), stream=True)
    indices = {call.index async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()}
    assert indices == {0}


async def test_without_tools_calls_are_text(running: Any) -> None:
    running.backend.answer = CALLS
    for body in (request(tool_choice="none"), {**request(), "tools": []}):
        reply = await running.openai.chat.completions.create(**body)
        assert reply.choices[0].message.content == CALLS
        assert reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"
    described = running.tokenizer.decode(running.backend.requests[0][0])
    assert "weather" not in described


async def test_a_required_call_is_forced_by_structured_output(running: Any) -> None:
    running.backend.answer = '[{"name": "time", "arguments": {}}]'
    reply = await running.openai.chat.completions.create(**request(tool_choice="required", parallel_tool_calls=False))
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
    assert choice.message.tool_calls[0].function.name == "time"
    output_format = running.backend.requests[0][1].structured_output
    assert output_format["type"] == "json_schema"
    schema = output_format["value"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    weather, time = schema["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "weather"}
    reference = weather["properties"]["arguments"]["properties"]["city"]["$ref"]
    assert _at(schema, reference) == {"type": "string"}
    assert time["properties"]["arguments"]["properties"] == {}


async def test_a_named_call_has_its_own_schema_and_ends_with_stop(running: Any) -> None:
    running.backend.answer = '{"city": "Rome"}'
    body = request(tool_choice={"type": "function", "function": {"name": "weather"}})
    reply = await running.openai.chat.completions.create(**body)
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "")
    assert choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    assert running.backend.requests[0][1].structured_output == {
        "type": "json_schema",
        "value": {**CITY, "additionalProperties": False},
    }


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("format_", [PERSON_FORMAT, {"type": "json_object"}])
async def test_with_a_json_format_an_answer_is_calls_or_json(running: Any, format_: Any) -> None:
    """A marker of calls in a string of the JSON is no call."""
    for answer, names in (
        (CALLS[CALLS.index("<tool_call>") :], ["weather", "time"]),
        (f'{{"age": 3, "note": {json.dumps(CALLS)}}}', []),
    ):
        running.backend.answer = answer
        reply = await running.openai.chat.completions.create(**request(response_format=format_, n=2))
        for choice in reply.choices:
            assert choice.finish_reason == ("tool_calls" if names else "stop")
            assert choice.message.content == (None if names else answer)
            assert [call.function.name for call in choice.message.tool_calls or ()] == names
        text, streamed = "", []
        async for chunk in await running.openai.chat.completions.create(
            **request(response_format=format_), stream=True
        ):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            streamed += [call.function.name for call in delta.tool_calls or () if call.function.name]
        assert (text, streamed) == ("" if names else answer, names)
    params = running.backend.requests[-1][1]
    assert params.call_structure is None
    assert params.structured_output["type"] == "grammar"
    assert '"weather"' in params.structured_output["value"]
    assert ('"age"' in params.structured_output["value"]) == (format_ is PERSON_FORMAT)
    many = params.structured_output["value"]
    await running.chat(tools=TOOLS, response_format=format_, parallel_tool_calls=False)
    one = running.backend.requests[-1][1].structured_output["value"]
    assert "group)*" in many
    assert "group)*" not in one


async def test_a_forced_call_takes_precedence_over_a_json_format(running: Any) -> None:
    running.backend.answer = '[{"name": "time", "arguments": {}}]'
    reply = await running.chat(tools=TOOLS, tool_choice="required", response_format=PERSON_FORMAT)
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "time"
    assert running.backend.requests[-1][1].structured_output["value"]["type"] == "array"


async def test_an_answer_that_continues_a_text_has_its_json_format_only(running: Any) -> None:
    continued = [*MESSAGES, {"role": "assistant", "content": "I"}]
    running.backend.answer = '{"age": 3}'
    fields = {"continue_final_message": True, "response_format": PERSON_FORMAT}
    reply = await running.chat(tools=TOOLS, messages=continued, **fields)
    assert reply.json()["choices"][0]["message"]["content"] == '{"age": 3}'
    assert running.backend.requests[-1][1].structured_output["type"] == "json_schema"


NARROW = {"type": "object", "properties": {"n": {"type": "integer", "not": {"const": 0}}}, "uniqueItems": True}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "narrow"}}])
async def test_a_tool_with_an_unknown_keyword_does_not_disable_the_others(running: Any, choice: Any) -> None:
    running.backend.answer = '[{"name": "time", "arguments": {}}]' if choice == "required" else '{"n": 0}'
    narrow = {"type": "function", "function": {"name": "narrow", "parameters": NARROW}}
    reply = await running.chat(tools=[*TOOLS, narrow], tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-keywords"] == "not, uniqueItems"
    assert '"not"' not in json.dumps(running.backend.requests[-1][1].structured_output)
    strict = {"type": "function", "function": {**narrow["function"], "strict": True}}
    reply = await running.chat(tools=[*TOOLS, strict], tool_choice=choice)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools")
    assert "not, uniqueItems" in error["message"]
    assert (await running.chat(tools=[*TOOLS, strict])).status_code == 200


async def test_a_strict_format_is_enforced_in_every_keyword_or_rejected(running: Any) -> None:
    running.backend.answer = '{"n": 0}'
    for strict, status in ((False, 200), (True, 400)):
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": NARROW, "strict": strict}}
        reply = await running.chat(response_format=format_)
        assert reply.status_code == status, reply.text
        text = {"format": {"type": "json_schema", "name": "x", "schema": NARROW, "strict": strict}}
        reply = await running.post("/v1/responses", {"input": "Hi", "text": text, "temperature": 0})
        assert reply.status_code == status, reply.text
        if status == 200:
            assert reply.headers["x-ignored-keywords"] == "not, uniqueItems"
    open_schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": open_schema, "strict": True}}
    await running.chat(response_format=format_)
    assert running.backend.requests[-1][1].structured_output["value"] == open_schema


async def test_regular_expressions_mean_ascii_and_look_around_is_rejected(running: Any) -> None:
    for fields in ({"guided_regex": r"\d+"}, {"structured_outputs": {"regex": r"\d+"}}):
        await running.chat(**fields)
        assert running.backend.requests[-1][1].structured_output == {"type": "regex", "value": "[0-9]+"}
    reply = await running.chat(guided_regex="(?!no)a")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "guided_regex")
    assert "(?!" in error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        {"type": None, "properties": {"a": {"type": "integer", "enum": None}}, "required": None},
    ],
)
async def test_the_parameters_of_a_tool_are_always_an_object(running: Any, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "f"}}
    assert (await running.chat(tools=[tool], tool_choice=choice)).status_code == 200
    schema = running.backend.requests[-1][1].structured_output["value"]
    assert schema == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}, "required": []}])
async def test_a_tool_without_parameters_is_called_with_an_empty_object(running: Any, parameters: Any) -> None:
    running.backend.answer = "{}"
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    await running.chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "now"}})
    schema = running.backend.requests[-1][1].structured_output["value"]
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)


@pytest.mark.parametrize("name", ["1st", "-list", "a.b", "_", "x" * 128])
async def test_a_tool_has_any_name_of_128_letters_digits_and_signs(running: Any, name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    assert (await running.chat(tools=[tool])).status_code == 200


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129])
async def test_other_names_of_tools_are_rejected(running: Any, name: str) -> None:
    reply = await running.chat(tools=[{"type": "function", "function": {"name": name}}])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].function.name")


async def test_a_call_cut_by_the_token_limit_has_reason_length(running: Any) -> None:
    running.backend.answer = CALLS
    for limit in (12, 30):
        reply = await running.openai.chat.completions.create(**request(max_tokens=limit))
        assert reply.choices[0].finish_reason == "length"


async def test_a_template_without_tools_gets_them_described_as_text(running: Any) -> None:
    running.backend.answer = "It is sunny."
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "sunny"},
    ]
    body = request(messages=history)
    before = copy.deepcopy(body)
    reply = await running.openai.chat.completions.create(**body)
    assert reply.choices[0].message.content == "It is sunny."
    assert body == before
    text = running.tokenizer.decode(running.backend.requests[0][0], skip_special=False)
    assert "Be brief.\n\nYou can call these functions" in text
    assert '{"name": "weather", "description": "Tells the weather."' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text
    assert '{"name": "function-name", "arguments": {"argument": "value"}}' in text


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}"
    "{{ m.tool_call_id }};{% endfor %}"
)


async def test_a_template_with_tools_gets_them_and_the_calls_as_objects(start_with_template: Any) -> None:
    running = await start_with_template(TEMPLATE)
    running.backend.answer = 'Well. [TOOL_CALLS] [{"name": "time", "arguments": {"zone": "UTC"}}]'
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "sunny"},
    ]
    reply = await running.openai.chat.completions.create(**request(messages=history))
    assert reply.choices[0].message.tool_calls[0].function.name == "time"
    text = running.tokenizer.decode(running.backend.requests[0][0], skip_special=False)
    assert text.startswith('{"type": "function", "function": {"name": "weather"')
    assert 'assistant:Hm[TOOL_CALLS]{"city": "Paris"}abc123def;tool:sunnyabc123def;' in text


async def test_the_tool_call_parser_can_be_chosen_or_switched_off(start: Any) -> None:
    running = await start(tool_call_parser="llama3_json")
    running.backend.answer = '{"name": "time", "parameters": {}}'
    reply = await running.openai.chat.completions.create(**request())
    assert reply.choices[0].message.tool_calls[0].function.name == "time"
    running = await start(tool_call_parser="none")
    rejected = await running.post("/v1/chat/completions", request())
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "tools")
    with pytest.raises(ValueError, match="no tool-call parser 'hermess': use auto, none or one of hermes"):
        await start(tool_call_parser="hermess")


UNKNOWN = "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}"
UNKNOWN += "{% endfor %}{% endfor %}"


async def test_calls_of_an_unknown_format_are_text_and_a_header_reports_it(start_with_template: Any) -> None:
    running = await start_with_template(UNKNOWN)
    running.backend.answer = "!weather Rome"
    header = "x-tool-call-format"
    for stream in (False, True):
        reply = await running.post("/v1/chat/completions", request(stream=stream))
        assert reply.headers[header] == "unknown"
        assert stream or reply.json()["choices"][0]["message"]["content"] == "!weather Rome"
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    body = {"model": "smollm2", "max_tokens": 9, "messages": MESSAGES, "tools": [tool]}
    reply = await running.post("/v1/messages", body)
    assert reply.headers[header] == "unknown", reply.text
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        assert header not in (await running.post("/v1/chat/completions", request(**fields))).headers
    running.backend.answer = '[{"name": "time", "arguments": {}}]'
    forced = await running.post("/v1/chat/completions", request(tool_choice="required"))
    assert header not in forced.headers
    assert forced.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "time"
    both = await running.post("/v1/chat/completions", request(response_format={"type": "json_object"}))
    error = both.json()["error"]
    assert (both.status_code, error["param"]) == (400, "response_format")
    assert "start the server with another --tool-call-parser, leave one of them out" in error["message"]
    (model,) = (await running.http.get("/v1/models")).json()["data"]
    assert (model["tool_call_format"], model["reasoning_format"]) == (None, None)
    assert (running.backend.formats.tool_calls, running.backend.formats.reasoning) == ("", "")


async def test_the_formats_of_a_model_are_reported(start_with_template: Any) -> None:
    template = "<think></think>{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    template += "{{ tools }}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    running = await start_with_template(template + "{% endfor %}{% endfor %}", special=["<think>", "</think>"])
    running.backend.answer = '[TOOL_CALLS]time[ARGS]{"zone": "UTC"}'
    reply = await running.post("/v1/chat/completions", request())
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"zone": "UTC"}'
    assert "x-tool-call-format" not in reply.headers
    (model,) = (await running.http.get("/v1/models")).json()["data"]
    assert (model["tool_call_format"], model["reasoning_format"]) == ("mistral", "think")
    assert (running.backend.formats.tool_calls, running.backend.formats.reasoning) == ("mistral", "think")


async def test_special_tokens_of_the_format_reach_the_parser(start_with_template: Any) -> None:
    """A marker that is a special token of the vocabulary is text for the parser only."""
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<|python_tag|>"
    running = await start_with_template(template, special=["<|python_tag|>"])
    running.backend.answer = '<|python_tag|>{"name": "time", "parameters": {"a": "b"}}'
    for stream in (False, True):
        reply = await running.openai.chat.completions.create(**request(), stream=stream)
        calls = [c.choices[0].delta.tool_calls async for c in reply] if stream else reply.choices[0].message.tool_calls
        assert any(calls)
    plain = await running.openai.chat.completions.create(**request(tool_choice="none"))
    assert plain.choices[0].message.content == '{"name": "time", "parameters": {"a": "b"}}'


def _at(schema: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


async def test_a_call_that_the_model_chooses_is_constrained_from_its_marker_on(running: Any) -> None:
    running.backend.answer = CALLS
    text = {"type": "string", "description": "Of a city. " * 100}
    schema = {"type": "object", "properties": {"description": text}, "not": {"required": ["x"]}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    await running.openai.chat.completions.create(**request(tools=[tool]))
    structure = running.backend.requests[-1][1].call_structure
    assert structure["markers"] == {"<tool_call>": "calls"}
    closed = {"type": "object", "properties": {"description": {"type": "string"}}, "additionalProperties": False}
    assert json.dumps(closed, separators=(",", ":")) in structure["grammar"]
    assert "group)*" in structure["grammar"]
    await running.openai.chat.completions.create(**request(parallel_tool_calls=False))
    assert "*" not in running.backend.requests[-1][1].call_structure["grammar"].splitlines()[0]


async def test_calls_are_not_constrained_where_nothing_says_how(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    continued = [*MESSAGES, {"role": "assistant", "content": "I"}]
    for body in (
        request(tool_choice="none"),
        request(tool_choice="required"),
        request(messages=continued, extra_body={"continue_final_message": True}),
    ):
        await running.openai.chat.completions.create(**body)
        assert running.backend.requests[-1][1].call_structure is None
    monkeypatch.setattr(call_grammars, "MAX_GRAMMAR_BYTES", 100)
    tool = {"type": "function", "function": {"name": "of_this_test"}}  # grammars of tools are kept
    await running.openai.chat.completions.create(**request(tools=[tool]))
    assert running.backend.requests[-1][1].call_structure is None


async def test_special_tokens_of_a_format_are_tokens_of_its_grammar(start_with_template: Any) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
    running = await start_with_template(template, special=["<tool_call>", "</tool_call>"])
    running.backend.answer = CALLS
    await running.openai.chat.completions.create(**request())
    grammar = running.backend.requests[-1][1].call_structure["grammar"]
    assert f"<[{running.tokenizer.token_id('</tool_call>')}]>" in grammar
    assert '"</tool_call>"' not in grammar
