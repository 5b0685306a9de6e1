"""Which fields a request body may have, what each becomes, and what is said of the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.requests.sampling_params import PARAMETERS, SamplingParams
from megatron_runtime.server import openai as package
from megatron_runtime.server.app import BODIES
from megatron_runtime.server.openai.fields import HTTP_FIELDS, PARAMETER_OF, NotOffered, reported
from megatron_runtime.server.openai.jobs import GUIDED_FIELDS, Options, Prompt, jobs_of
from megatron_runtime.server.openai.schema import (
    Body,
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    StructuredOutputs,
    only,
)
from megatron_runtime.tokenization import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
REQUIRED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi", "max_tokens": 1},
    "chat/completions": {"messages": HI, "max_tokens": 1},
    "responses": {"input": "Hi", "max_output_tokens": 1},
    "messages": {"messages": HI, "max_tokens": 1},
    "messages/count_tokens": {"messages": HI},
    "embeddings": {"input": "Hi"},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [1]},
}
READ_AS_A_WHOLE = {StructuredOutputs, CalledFunction}
NOT_OFFERED = [(path, name) for path, body in BODIES.items() for name in body.policy.not_offered or ()]


def params_of(tokenizer: Tokenizer, **fields: Any) -> SamplingParams:
    """Return the sampling parameters that a chat request with these fields has."""
    request = ChatRequest(messages=HI, **fields)  # type: ignore[arg-type]
    options = Options(max_tokens=request.max_tokens, log_probs=None)
    (job,), _ = jobs_of(
        request,
        [Prompt([1], param="messages")],
        options,
        tokenizer=tokenizer,
        sequence_limit=None,
        cache_salt=request.cache_salt,
    )
    return job.params


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    """Yield every class of an object in a request body."""
    for sub in kind.__subclasses__():
        yield sub
        yield from bodies(sub)


def test_every_field_of_a_body_is_read() -> None:
    read = {*PARAMETER_OF, *GUIDED_FIELDS}
    for file in Path(package.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for kind in {*bodies()} - READ_AS_A_WHOLE:
        for name, field in kind.model_fields.items():
            constrains = get_origin(field.annotation) is Literal or any(
                type(item) is type(only()) for item in field.metadata
            )
            assert name in read or constrains, f"{kind.__name__}.{name} is accepted, and nothing reads it"


def test_every_field_of_a_sampling_parameter_exists_and_has_one_meaning() -> None:
    assert len(PARAMETER_OF) == len(HTTP_FIELDS)
    for path in ("completions", "chat/completions"):
        assert PARAMETER_OF.keys() <= BODIES[path].model_fields.keys()
    for path, body in BODIES.items():
        policy = body.policy
        names = [*body.model_fields, *policy.without_effect, *(policy.not_offered or ())]
        assert len(set(names)) == len(names), path
        assert all(field.description for field in body.model_fields.values()), path


@given(data=st.data())
def test_a_field_becomes_its_sampling_parameter(tokenizer: Tokenizer, data: st.DataObject) -> None:
    values: dict[str, Any] = {
        "include_stop_str_in_output": st.booleans(),
        "stop": st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
        "bad_words": st.lists(st.sampled_from(["a", "b c"]), min_size=1),
        "min_tokens": st.integers(0, 2**31 - 1),
        "streaming_interval": st.integers(1, 2**31 - 1),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "min_p": st.floats(0, 1),
        "top_p": st.floats(1e-6, 1),
        "top_k": st.integers(0, 2**31 - 1),
        "temperature": st.floats(1e-5, 2),
        "seed": st.integers(0, 2**63 - 1),
        "max_tokens": st.integers(1, 2**31 - 1),
        "stream": st.booleans(),
    }
    assert set(values) | {"logit_bias", "stop_token_ids"} == set(PARAMETER_OF)
    name = data.draw(st.sampled_from(sorted(values)))
    value = data.draw(values[name])
    params = params_of(tokenizer, **{name: value})
    assert getattr(params, PARAMETER_OF[name]) == value
    neutral = params_of(tokenizer)
    changed = {item for item in PARAMETERS if getattr(params, item) != getattr(neutral, item)}
    assert changed <= {PARAMETER_OF[name]}


@given(
    st.lists(st.text(max_size=100), max_size=100),
)
def test_ignored_fields_fit_a_header(names: list[str]) -> None:
    header = reported(names)
    shown = header.split(", ") if header else []
    assert header.isascii()
    assert header.isprintable()
    assert len(shown) <= 20
    assert all(len(name) <= 64 for name in shown)


@pytest.mark.parametrize("path", REQUIRED)
async def test_unknown_fields_are_ignored_named_and_counted(running: Any, path: str) -> None:
    unknown = {"cache_prompt": True, "options": {"num_ctx": 1}, "é\r\nx: y": 1, **{f"f{n}": n for n in range(30)}}
    reply = await running.post(f"/v1/{path}", {**REQUIRED[path], **unknown})
    assert reply.status_code == 200, reply.text
    names = reply.headers["x-ignored-fields"].split(", ")
    assert names[:3] == ["cache_prompt", "options", "???x:?y"]
    assert len(names) == 20
    metrics = (await running.http.get("/metrics")).text
    assert f"megatron_http_ignored_fields_total {float(len(unknown))}" in metrics
    assert "cache_prompt" not in metrics
    plain = await running.post(f"/v1/{path}", REQUIRED[path])
    assert "x-ignored-fields" not in plain.headers


@pytest.mark.parametrize(("path", "name"), NOT_OFFERED)
async def test_a_field_that_is_not_offered_is_rejected_if_it_asks_for_something(
    running: Any, path: str, name: str
) -> None:
    rule = (BODIES[path].policy.not_offered or {})[name]
    for value in (None, *rule.neutral):
        reply = await running.post(f"/v1/{path}", {**REQUIRED[path], name: value})
        assert reply.status_code == 200, (value, reply.text)
        assert "x-ignored-fields" not in reply.headers
    reply = await running.post(f"/v1/{path}", {**REQUIRED[path], name: {"asks": "for something"}})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert f"{name} is not offered by this server: leave it out" in error["message"]
    assert error.get("param", name) == name


@pytest.mark.parametrize("path", REQUIRED)
async def test_fields_without_effect_take_any_value(running: Any, path: str) -> None:
    fields = {name: {"any": ["value"]} for name in BODIES[path].policy.without_effect}
    reply = await running.post(f"/v1/{path}", {**REQUIRED[path], **fields})
    assert reply.status_code == 200, reply.text
    assert "x-ignored-fields" not in reply.headers


def test_a_neutral_value_is_compared_with_its_type() -> None:
    for neutral, other in ((False, True), (1, True), (0, 1), ([], 0), ({}, [])):
        NotOffered((neutral,)).check("field", neutral)
        with pytest.raises(ValueError, match="field is not offered"):
            NotOffered((neutral,)).check("field", other)


async def test_unknown_members_are_ignored_at_every_depth(running: Any) -> None:
    extra = {"cache_control": {"type": "ephemeral"}, "_id": 7, "opts": {"deep": [{}]}}
    function = {"name": "f", "parameters": {"type": "object"}, "return": {"type": "string"}, **extra}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **extra}, "index": 0, **extra}
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x", **extra}], **extra},
            {"role": "user", "content": "Hi", "type": "text", **extra},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], **extra},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1", **extra}], **extra},
        ],
        "tools": [{"type": "function", "function": function, **extra}],
        "stream": True,
        "stream_options": {"include_usage": None, "continuous_usage_stats": True, **extra},
        "max_tokens": 1,
    }
    reply = await running.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    assert "x-ignored-fields" not in reply.headers
    plain = {**body, "messages": [{k: v for k, v in each.items() if k not in extra} for each in body["messages"]]}
    await running.post("/v1/chat/completions", plain)
    assert running.backend.requests[0][0] == running.backend.requests[1][0]


async def test_a_schema_of_json_object_is_enforced(running: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format_ in (
        {"type": "json_object", "schema": schema, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "other": 1}},
    ):
        reply = await running.chat(response_format=format_)
        assert reply.status_code == 200, reply.text
        assert running.backend.requests[-1][1].structured_output == {"type": "json_schema", "value": schema}
    await running.chat(response_format={"type": "json_object"})
    assert running.backend.requests[-1][1].structured_output == {"type": "json_object", "value": None}


def test_completions_and_chat_have_the_same_common_fields() -> None:
    common = CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    assert common >= {"model", "temperature", "stop", "n", "stream", "response_format", "return_token_ids"}
