"""Error answers: the format of the OpenAI API, the field at fault, and no internal details."""

from __future__ import annotations

import itertools
import re
from typing import Any

import openai
import pytest
from hostile_grammars import chained_references, chained_rules, nested_arrays

from megatron_runtime.client.rejection import (
    InvalidRequestError,
    ModelChangedError,
    RequestFailedError,
    RequestRejectedError,
)

CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}

JSON = {"Content-Type": "application/json"}


def error_of(reply: Any) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


ABORTED = {"finish_reason": "abort"}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ARRAY_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}

BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "not 'hot'"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"seed": 1 << 70}, "seed", "less than"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop[0]", "at least 1 character"),
    ({"stop": ["x"] * 100}, "stop", "at most"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "valid array"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text only"),
    ({"model": 5}, "model", "valid string"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "only with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": "x"}, "presence_penalty", "valid number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"repetition_penalty": 1e-44}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "decimal strings, not 'x'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "valid"),
    ({"logit_bias": {"007": 1}}, "logit_bias", "decimal strings, not '007'"),
    ({"logit_bias": {"5" + 30 * "0": 1}}, "logit_bias", "decimal strings, not '5000"),
    ({"logit_bias": {30 * "0" + "5": 1}}, "logit_bias", "decimal strings, not '0000"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias", "decimal strings"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "token id 49152 is not in 0..49151"),
    ({"bad_words": "x"}, "bad_words", "valid array"),
    ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
    ({"bad_words": [" "]}, "bad_words", "not only white space"),
    ({"bad_words": ["x"] * 129}, "bad_words", "at most 128"),
    ({"bad_words": ["x" * 3000, "y" * 3000]}, "bad_words", "4096 characters in all"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "token id 49152 is not in 0..49151"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs a json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
        "response_format.json_schema.schema",
        "should be an object",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
        "guided_regex",
        "cannot be combined with response_format",
    ),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[" * 60_000}, "guided_json", "nested deeper than 64 levels"),
    ({"guided_json": " " * 70_000}, "guided_json", "at most 65536 bytes"),
    ({"guided_json": chained_references(1200)["value"]}, "guided_json", "at most 400 definitions"),
    ({"guided_json": nested_arrays(80)["value"]}, None, "nested deeper than 64 levels"),
    ({"guided_grammar": chained_rules(2800)["value"]}, "guided_grammar", "at most 1000 rules"),
    ({"guided_regex": "a{20000}"}, "guided_regex", "at most 10000 repetitions"),
    ({"structured_outputs": {"regex": "(" * 99}}, "structured_outputs", "at most 64 brackets"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"multipleOf": 1e9}}}},
        "response_format",
        "at most 10000",
    ),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [TOOL, TOOL]}, "tools", "several functions named 'f'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "'required'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "no function 'g' among the tools: f",
    ),
    ({"tools": [TOOL], "guided_regex": "a+"}, "guided_regex", "a regex cannot be combined with tools, only JSON can"),
    (
        {"tools": [TOOL], "guided_json": {"type": "array", "prefixItems": [{"enum": ["a" * 65_000]}]}},
        "guided_json",
        "together with the tools, use at most 65536 bytes of description: shorten it",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"functions": [{"name": "f"}]}, "functions", "not offered"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "Missing"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "needs a string 'text'"),
    (
        {"tools": [ARRAY_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tools",
        "'f' have type 'array': use type 'object'",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON object as a string",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "leave one of the two"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "set by the request itself"),
]
"""Fields of a chat request, the field that the error names, words of its message."""


async def test_the_error_of_a_bad_field_has_its_name_and_a_remedy(running: Any, subtests: pytest.Subtests) -> None:
    for fields, param, phrase in BAD_FIELDS:
        with subtests.test(fields=fields):
            reply = await running.post("/v1/chat/completions", {**CHAT, **fields})
            assert reply.status_code == 400, reply.text
            error = error_of(reply)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert phrase in error["message"]
    assert running.backend.requests == []


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "it has no tokens"),
    ([], "a string, a list of token ids"),
    ([[]], "non-empty lists"),
    (["a", [1]], "all prompts to be strings"),
    ([49152], "token id 49152 is not in 0..49151"),
    ([-1], "token id -1"),
    ([1 << 80], "token id"),
    (None, "a string, a list"),
    ({"a": 1}, "a string, a list"),
    (["x"] * 1025, "1 to 1024"),
]


async def test_a_bad_prompt_is_rejected(running: Any, subtests: pytest.Subtests) -> None:
    for prompt, phrase in BAD_PROMPTS:
        with subtests.test(prompt=prompt):
            reply = await running.post("/v1/completions", {"model": "smollm2", "prompt": prompt})
            assert reply.status_code == 400, reply.text
            assert error_of(reply)["param"] == "prompt"
            assert phrase in error_of(reply)["message"]


async def test_fields_that_are_not_offered_accept_only_neutral_values(running: Any) -> None:
    body = {"model": "smollm2", "prompt": "x", "temperature": 0}
    for fields in ({"best_of": 1}, {"best_of": None}, {"suffix": ""}):
        assert (await running.post("/v1/completions", {**body, **fields})).status_code == 200
    for field, value in (("best_of", 2), ("best_of", True), ("suffix", "end")):
        reply = await running.post("/v1/completions", {**body, field: value})
        assert (reply.status_code, error_of(reply)["param"]) == (400, field)


async def test_a_body_that_is_not_a_request_is_rejected(running: Any) -> None:
    bodies = [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000]
    for path, body in itertools.product(("/v1/chat/completions", "/v1/completions"), bodies):
        reply = await running.http.post(path, content=body, headers=JSON)
        assert reply.status_code == 400
        assert error_of(reply)["type"] == "invalid_request_error"


async def test_unknown_model_and_route_and_method(running: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="offers 'smollm2'") as caught:
        await running.openai.chat.completions.create(**{**CHAT, "model": "gpt-4"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    reply = await running.http.get("/v1/nothing")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "unknown_url")
    reply = await running.http.get("/v1/chat/completions")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


async def test_a_prompt_beyond_the_context_is_rejected(start: Any) -> None:
    running = await start(max_sequence_length=64)
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "word " * 100}]}),
        ("/v1/completions", {"model": "smollm2", "prompt": [5] * 64}),
    ):
        reply = await running.post(path, body)
        assert reply.status_code == 400
        assert "This model's maximum context length is 64 tokens" in error_of(reply)["message"]
        assert error_of(reply)["code"] == "context_length_exceeded"
    fits = await running.post("/v1/completions", {"model": "smollm2", "prompt": [5] * 63, "max_tokens": 50})
    assert fits.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("code", "sdk_error"), [(429, openai.RateLimitError), (504, openai.InternalServerError)])
@pytest.mark.parametrize("stream", [False, True])
async def test_rejections_keep_their_status(running: Any, code: int, sdk_error: type[Exception], stream: bool) -> None:
    running.backend.reject = RequestRejectedError(code, "the queue is full", 2.2)
    with pytest.raises(sdk_error, match="the queue is full") as caught:
        await running.openai.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.response.status_code == code  # type: ignore[attr-defined]
    assert caught.value.response.headers["retry-after"] == "3"  # type: ignore[attr-defined]


async def test_a_failure_of_the_engine_is_reported(running: Any) -> None:
    running.backend.failure = {"type": "MaxSequenceLengthOverflow", "message": "900 > 800", "code": 400}
    reply = await running.chat()
    assert reply.status_code == 400
    assert error_of(reply)["message"] == "This model's maximum context length is exceeded: 900 > 800"
    running.backend.failure["code"] = None
    assert (await running.chat()).status_code == 400
    for code in (None, 7, "503"):
        running.backend.failure = {"type": "EngineError", "message": "lost", "code": code}
        assert (await running.chat()).status_code == 500
    for code in (429, 503):
        running.backend.failure = {"type": "Busy", "message": "later", "code": code}
        reply = await running.chat()
        assert (reply.status_code, reply.headers["retry-after"]) == (code, "1")


async def test_an_internal_error_is_answered_without_details(running: Any, monkeypatch: Any) -> None:
    def fail(*_arguments: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(running.backend, "add_request", fail)
    reply = await running.chat()
    assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")
    assert reply.headers["x-request-id"].startswith("req_")
    assert "secret" not in reply.text
    monkeypatch.undo()
    assert (await running.chat()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_aborts_the_others(running: Any, monkeypatch: Any, stream: bool) -> None:
    running.backend.gate.clear()
    running.backend.free_tokens = 0
    name = "add_request_streaming" if stream else "add_request"
    accept, count = getattr(running.backend, name), itertools.count()

    def reject_the_third(*arguments: Any, **options: Any) -> Any:
        if next(count) == 2:
            raise RequestRejectedError(429, "the queue is full", 1.0)
        return accept(*arguments, **options)

    monkeypatch.setattr(running.backend, name, reject_the_third)
    assert (await running.chat(n=3, stream=stream)).status_code == 429
    await running.backend.until(open_requests=0)
    assert running.backend.aborted == len(running.backend.requests)


async def test_an_answer_that_ended_early_is_an_error(running: Any, monkeypatch: Any) -> None:
    whole = running.backend._reply
    monkeypatch.setattr(running.backend, "_reply", lambda *args, **named: {**whole(*args, **named), **ABORTED})
    reply = await running.chat()
    assert (reply.status_code, error_of(reply)["code"], reply.headers["retry-after"]) == (503, "abort", "1")


async def test_prompts_times_choices_are_bounded(running: Any) -> None:
    reply = await running.post("/v1/completions", {"model": "smollm2", "prompt": ["x"] * 9, "n": 128})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "n")
    assert running.backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_a_replaced_model_is_reported(running: Any, stream: bool) -> None:
    running.backend.reject = ModelChangedError(409, "the engines run another model")
    reply = await running.chat(stream=stream)
    assert reply.status_code == 409
    assert (error_of(reply)["code"], error_of(reply)["type"]) == ("model_changed", "conflict_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parameter_that_no_engine_supports_is_named_by_its_field(running: Any, stream: bool) -> None:
    message = "structured_output needs structured output after reasoning, which no engine supports"
    running.backend.reject = InvalidRequestError(400, message, field="structured_output")
    reply = await running.chat(stream=stream, response_format={"type": "json_object"})
    assert reply.status_code == 400
    assert error_of(reply) == {
        "message": message,
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "unsupported_value",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_engines_is_reported_as_final(running: Any, stream: bool, caplog: Any) -> None:
    """OpenAI's clients repeat a request after any 5xx, unless the answer forbids it."""
    running.backend.reject = RequestFailedError(500, "request 00ff ended 3 engines")
    reply = await running.chat(stream=stream)
    assert reply.status_code == 500
    assert (error_of(reply)["code"], error_of(reply)["type"]) == ("engine_failed", "server_error")
    assert "00ff" in error_of(reply)["message"]
    assert "engine_failed: request 00ff" in caplog.text
    assert "retry-after" not in reply.headers
    with pytest.raises(openai.InternalServerError):
        await running.openai.with_options(max_retries=3).chat.completions.create(**CHAT)
    assert caplog.text.count("engine_failed: request 00ff") == 2, "the client sent it again"


async def test_a_failure_during_a_stream_is_an_event(running: Any) -> None:
    running.backend.failure = {"type": "Stopped", "message": "the engines were stopped", "code": 503}
    stream = await running.openai.chat.completions.create(**CHAT, stream=True)
    assert (await anext(stream)).choices
    with pytest.raises(openai.APIError, match="the engines were stopped"):
        _ = [chunk async for chunk in stream]
    events = (await running.chat(stream=True)).text.split("\n\n")
    assert ["error" in event for event in events] == [False] * (len(events) - 2) + [True, False]
    assert "data: [DONE]" not in events


async def test_a_body_above_the_limit_is_rejected(start: Any) -> None:
    running = await start(max_body_bytes=1000)

    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * 500

    for content in (b" " * 1001, chunks()):
        reply = await running.http.post("/v1/completions", content=content, headers=JSON)
        assert (reply.status_code, error_of(reply)["code"]) == (413, "body_too_large")


async def test_every_answer_has_the_id_of_its_request(running: Any) -> None:
    given = await running.http.get("/v1/models", headers={"x-request-id": "a-Z0_9.:/+=@"})
    assert given.headers["x-request-id"] == "a-Z0_9.:/+=@"
    made = [await running.http.get(path) for path in ("/v1/models", "/livez", "/nothing", "/")]
    ids = [reply.headers["x-request-id"] for reply in made]
    assert all(re.fullmatch("req_[0-9a-f]{32}", id_) for id_ in ids)
    assert len(set(ids)) == len(ids)
    for wrong in ("a b", "a\tb", "x" * 129, "é"):
        reply = await running.http.get("/v1/models", headers={"x-request-id": wrong.encode()})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request_id")
        assert "128" in reply.json()["error"]["message"]
        assert reply.headers["x-request-id"].startswith("req_")


async def test_the_coordinator_gets_the_id_of_each_request(running: Any) -> None:
    body = {"model": "smollm2", "prompt": "Hi", "n": 2, "temperature": 0}
    for stream in (False, True):
        headers = {"x-request-id": f"order-{stream}"}
        reply = await running.http.post("/v1/completions", json={**body, "stream": stream}, headers=headers)
        assert reply.status_code == 200
        assert running.backend.request_ids[-2:] == [f"order-{stream}"] * 2
