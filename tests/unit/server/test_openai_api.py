"""The OpenAI API as the openai SDK and plain HTTP see it, and its documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.server.openai.schema import ChatRequest, CompletionRequest

CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "".join(page.read_text() for page in sorted((Path(__file__).parents[3] / "docs").rglob("*.md")))
COMPLETION: dict[str, Any] = {"model": "smollm2", "temperature": 0, "prompt": "Once", "max_tokens": 100}


async def test_models_are_listed_and_fetched(running: Any) -> None:
    models = [model.id async for model in running.openai.models.list()]
    assert models == ["smollm2"]
    assert (await running.openai.models.retrieve("smollm2")).id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        await running.openai.models.retrieve("other")


async def test_a_server_may_answer_every_model_name(start: Any, answer: str) -> None:
    running = await start(any_model_name=True)
    reply = await running.openai.chat.completions.create(**{**CHAT, "model": "other"})
    assert (reply.choices[0].message.content, reply.model) == (answer, "smollm2")


async def test_chat_answer_has_text_reason_and_usage(running: Any, tokenizer: Any, answer: str) -> None:
    reply = await running.openai.chat.completions.create(**CHAT)
    assert reply.choices[0].message.content == answer
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    prompt = tokenizer.encode_chat(CHAT["messages"])
    assert running.backend.requests[0][0] == prompt
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(tokenizer.encode(answer)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_n_choices_is_counted_once(running: Any, tokenizer: Any, answer: str, stream: bool) -> None:
    """The engine reports three cached tokens with each choice."""
    prompts = ["Once", "Twice upon"]
    body = {**COMPLETION, "prompt": prompts, "n": 3}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await running.openai.completions.create(**body, **options)]
        usage = chunks[-1].usage
    else:
        usage = (await running.openai.completions.create(**body)).usage
    assert len(running.backend.requests) == 6
    assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert usage.prompt_tokens_details.cached_tokens == 2 * 3
    assert usage.completion_tokens == 6 * (len(tokenizer.encode(answer)) + 1)


async def test_streamed_chat_equals_the_whole_answer(running: Any, answer: str) -> None:
    stream = await running.openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == answer
    assert len([text for text in texts if text]) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    whole = await running.openai.chat.completions.create(**CHAT)
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_an_event_is_one_line_for_every_reader_of_lines(running: Any) -> None:
    """httpx and the readline module of Node also end a line at these characters."""
    running.backend.answer = text = "a\u2028b\u2029c\x85d\x0be"
    reply = await running.chat(stream=True)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_with_usage_every_event_has_the_field_and_the_last_one_the_numbers(running: Any, path: str) -> None:
    body = {**(COMPLETION if path == "completions" else CHAT), "stream": True}
    for options, has_field in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        reply = await running.post(f"/v1/{path}", {**body, **options})
        chunks = [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n")[:-2]]
        assert {"usage" in chunk for chunk in chunks} == {has_field}
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
        assert len(usages) == has_field
        assert (chunks[-1]["choices"] == []) is has_field


async def test_events_are_framed_and_end_with_done(running: Any) -> None:
    reply = await running.chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("café", "The llama 🦙 says: naïve "),
        (["nowhere", "東"], "The llama 🦙 says: naïve café, "),
        (["The"], ""),
    ],
)
async def test_stop_strings_end_the_text_before_them(running: Any, stream: bool, stop: Any, expected: str) -> None:
    if stream:
        chunks = [c async for c in await running.openai.chat.completions.create(**CHAT, stop=stop, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        reply = await running.openai.chat.completions.create(**CHAT, stop=stop)
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (text, reason) == (expected, "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_ends_the_answer_is_not_part_of_it(
    running: Any, tokenizer: Any, answer: str, stream: bool
) -> None:
    comma = tokenizer.encode(",")[0]
    extra = {"stop_token_ids": [comma]}
    reply = await running.chat(stream=stream, **extra)
    expected = answer.split(",")[0]
    if stream:
        deltas = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
        assert "".join(delta["choices"][0]["delta"].get("content", "") for delta in deltas) == expected
    else:
        assert reply.json()["choices"][0]["message"]["content"] == expected
        below_minimum = await running.chat(min_tokens=50, max_tokens=50, **extra)
        assert "," in below_minimum.json()["choices"][0]["message"]["content"]


async def test_token_limits_cut_with_reason_length(running: Any, tokenizer: Any) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        reply = await running.openai.chat.completions.create(**CHAT, **{field: 4})
        assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 4)
    await running.openai.completions.create(model="smollm2", prompt="x")
    assert running.backend.requests[-1][1].num_tokens_to_generate == 16
    await running.openai.chat.completions.create(**CHAT)
    prompt, params = running.backend.requests[-1]
    assert params.num_tokens_to_generate == tokenizer.context_length - len(prompt)


async def test_a_character_cut_by_the_token_limit_is_a_replacement_character(
    running: Any, tokenizer: Any, answer: str
) -> None:
    tokens = tokenizer.encode(answer)
    texts = [tokenizer.decode(tokens[:limit]) for limit in range(1, 12)]
    assert any(text.endswith("\N{REPLACEMENT CHARACTER}") for text in texts)
    for limit, text in enumerate(texts, start=1):
        reply = await running.openai.chat.completions.create(**CHAT, max_tokens=limit)
        assert reply.choices[0].message.content == text


async def test_several_prompts_keep_order_and_count_each_once(running: Any, tokenizer: Any, answer: str) -> None:
    prompts = ["One", "Two and more", "🦙"]
    reply = await running.openai.completions.create(
        model="smollm2", prompt=prompts, temperature=0, n=2, max_tokens=100, echo=True
    )
    assert [choice.text for choice in reply.choices] == [text + answer for text in prompts for _ in range(2)]
    assert reply.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens == 6 * (len(tokenizer.encode(answer)) + 1)


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], [19556], [[19556]]])
async def test_every_type_of_prompt_reaches_the_backend_as_tokens(running: Any, prompt: Any) -> None:
    reply = await running.post("/v1/completions", {**COMPLETION, "prompt": prompt, "echo": True})
    assert running.backend.requests[0][0] == [19556]
    assert reply.json()["choices"][0]["text"].startswith("Hello")


async def test_content_parts_and_developer_messages_are_text(running: Any, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    await running.openai.chat.completions.create(model="smollm2", messages=messages)
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    assert running.backend.requests[0][0] == tokenizer.encode_chat(expected)


async def test_an_answer_can_be_sent_back_as_history(running: Any) -> None:
    reply = await running.openai.chat.completions.create(**CHAT)
    history = [*CHAT["messages"], reply.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    again = await running.openai.chat.completions.create(model="smollm2", messages=history)
    assert again.choices


async def test_sampling_fields_reach_the_backend(running: Any) -> None:
    await running.chat(temperature=0.5, top_p=0.9, top_k=40, min_tokens=3, seed=5, ignore_eos=True)
    params = running.backend.requests[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_tokens, params.seed) == (0.5, 0.9, 40, 3, 5)
    assert (params.termination_id, params.stop_token_ids) == (-1, None)
    await running.chat(temperature=0, top_p=0.3)
    params = running.backend.requests[1][1]
    assert (params.temperature, params.top_k, params.top_p) == (0, 1, 0)
    assert (params.termination_id, params.stop_token_ids) == (2, [0])
    await running.chat(temperature=1, top_k=-1)
    assert running.backend.requests[2][1].top_k == 0


async def test_sampling_fields_beyond_openai_reach_the_backend(start: Any) -> None:
    running = await start(allow_priority=True)
    fields = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 0.5, "priority": 7}
    fields["bad_words"] = ["ugly", "bad word"]
    others = {"cache_salt": "tenant", "streaming_interval": 4, "include_stop_str_in_output": True, "stop": "x"}
    await running.chat(temperature=0.5, logit_bias={"5": -100, "7": 1.5}, **fields, **others)
    params = running.backend.requests[0][1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.cache_salt, params.streaming_interval, params.detokenize_stop_sequence) == ("tenant", 4, True)
    assert params.logit_bias == {5: -100.0, 7: 1.5}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "json_object", "value": None}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"type": "json_schema", "value": {"type": "object"}},
        ),
        ({"guided_json": {"type": "array"}}, {"type": "json_schema", "value": {"type": "array"}}),
        ({"guided_json": '{"type": "null"}'}, {"type": "json_schema", "value": {"type": "null"}}),
        ({"guided_regex": "a+"}, {"type": "regex", "value": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"type": "choice", "value": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"type": "grammar", "value": "start: /a/"}),
        ({"structured_outputs": {"json": True}}, {"type": "json_schema", "value": {}}),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object", "value": None}),
        ({"response_format": {"type": "text"}, "guided_regex": "b"}, {"type": "regex", "value": "b"}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_structured_output_fields_reach_the_backend(running: Any, fields: dict[str, Any], form: Any) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
        reply = await running.post(f"/v1/{path}", {**body, **fields})
        assert reply.status_code == 200, reply.text
        assert running.backend.requests[-1][1].structured_output == form


async def test_a_structured_output_that_the_engine_rejects_names_its_field(running: Any) -> None:
    message = "the regular expression is not closed"
    running.backend.failure = {"code": 400, "type": "InvalidRequest", "message": message, "field": "structured_output"}
    for fields, param in (
        ({"guided_regex": "("}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ):
        reply = await running.chat(**fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert message in reply.json()["error"]["message"]


async def test_annotations_and_neutral_values_change_nothing(running: Any, answer: str) -> None:
    reply = await running.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        logprobs=False,
        tools=[],
        tool_choice="auto",
        frequency_penalty=0,
        presence_penalty=0.0,
        response_format={"type": "text"},
        logit_bias={},
        parallel_tool_calls=True,
    )
    assert reply.json()["choices"][0]["message"]["content"] == answer


async def test_a_text_becomes_the_tokens_of_its_prompt(running: Any, tokenizer: Any) -> None:
    text = "naïve 🦙 river"
    reply = (await running.post("/tokenize", {"model": "smollm2", "prompt": text, "return_token_strs": True})).json()
    assert reply["tokens"] == tokenizer.encode(text)
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == tokenizer.context_length
    assert reply["token_strs"][-1] == " river"
    await running.post("/v1/completions", {"model": "smollm2", "prompt": text})
    assert running.backend.requests[0][0] == reply["tokens"]
    back = await running.post("/v1/detokenize", {"tokens": reply["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_conversation_becomes_the_tokens_of_its_prompt(running: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for extra in ({}, {"tools": tools}):
        reply = await running.post("/v1/tokenize", {"messages": messages, **extra})
        await running.chat(**extra)
        assert running.backend.requests[-1][0] == reply.json()["tokens"]
    without = await running.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert (
        "assistant\n" not in (await running.post("/detokenize", {"tokens": without.json()["tokens"]})).json()["prompt"]
    )


async def test_a_text_that_cannot_be_tokenized_names_its_field(running: Any) -> None:
    for path, body, param in (
        ("tokenize", {}, "messages"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a", "model": 5}, "model"),
        ("tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("detokenize", {"tokens": [49152]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        reply = await running.post(f"/{path}", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), body
    unknown = await running.post("/tokenize", {"prompt": "a", "model": "other"})
    assert unknown.status_code == 404


async def test_every_operation_of_the_schema_has_its_own_id(running: Any) -> None:
    document = (await running.http.get("/openapi.json")).json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) > 10
    assert all("requestBody" in document["paths"][f"/v1/{path}"]["post"] for path in ("completions", "tokenize"))


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_every_field_is_documented(request_type: Any) -> None:
    missing = [name for name in request_type.model_fields if f"`{name}`" not in PAGE and f"`{name}." not in PAGE]
    # The page documents structured_outputs by its members.
    assert [name for name in missing if name != "structured_outputs"] == []


def test_every_parser_is_documented() -> None:
    assert all(f"| `{name}` |" in PAGE for name in PARSERS)


async def test_every_metric_is_documented(running: Any) -> None:
    await running.chat(stream=True)
    lines = (await running.http.get("/metrics")).text.splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE megatron_")}
    documented = {name for name in names if f"{name.removeprefix('megatron_').removesuffix('_total')}" in PAGE}
    assert names - documented - {name for name in names if name.endswith("_created")} == set()
