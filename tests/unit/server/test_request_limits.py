"""No request body blocks the event loop or takes much memory: every part of it is bounded and validated once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import from_json

from megatron_runtime.requests.sampling_params import PARAMETERS, SamplingParams
from megatron_runtime.server import guards
from megatron_runtime.server.guards import MAX_CONTAINERS, MAX_DEPTH, JsonLimitError, JsonScan, NotJsonError
from megatron_runtime.server.openai.schema import (
    FREE_JSON,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

COMPLETION: dict[str, Any] = {"model": "smollm2", "temperature": 0, "prompt": "x"}
CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}


def unbounded(schema: Any, place: str, definitions: dict[str, Any]) -> Iterator[str]:
    """Places of a pydantic core schema where a list, a map or any value has no limit."""
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from unbounded(item, place, definitions)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in ("list", "dict", "set", "frozenset", "tuple") and not schema.get("max_length"):
        yield f"{place}: {kind}"
    if kind == "any":
        yield f"{place}: any"
    if kind == "definition-ref":
        yield from unbounded(definitions[schema["schema_ref"]], place, definitions)
    for name, part in schema.items():
        if name == "fields":
            for field, inner in part.items():
                yield from unbounded(inner, f"{place}.{field}", definitions)
        elif name not in ("metadata", "serialization", "default", "function", "ref"):
            yield from unbounded(part, place, definitions)


def bounded_any(model: type[BaseModel], path: list[str]) -> bool:
    """Whether the field at a path is marked as JSON that the scan bounds."""
    annotation: Any = model
    for name in path:
        field = next((found.model_fields[name] for found in models_in(annotation) if name in found.model_fields), None)
        assert field is not None, (model, path)
        annotation = [field.annotation, *field.metadata]
    return FREE_JSON in leaves(annotation)


def leaves(annotation: Any) -> list[Any]:
    """All parts of an annotation, the metadata of Annotated included."""
    parts = [
        *(annotation if isinstance(annotation, list) else ()),
        *getattr(annotation, "__args__", ()),
        *getattr(annotation, "__metadata__", ()),
    ]
    return [annotation, *itertools.chain.from_iterable(leaves(part) for part in parts)]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    return [leaf for leaf in leaves(annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_list_and_map_of_a_request_is_bounded(model: type[BaseModel]) -> None:
    schema: Any = model.__pydantic_core_schema__
    definitions = {item["ref"]: item for item in schema.get("definitions", ())}
    found = list(unbounded(schema.get("schema", schema), model.__name__, definitions))
    assert any(place.endswith(": any") for place in found) or model is DetokenizeRequest
    wrong = [
        place
        for place in found
        if not place.endswith(": any") or not bounded_any(model, place.removesuffix(": any").split(".")[1:])
    ]
    assert wrong == []


class Unbounded(BaseModel):
    inner: list[dict[str, int]]
    anything: Any


def test_the_check_above_finds_unbounded_fields() -> None:
    found = set(unbounded(Unbounded.__pydantic_core_schema__, "U", {}))
    assert found == {"U.inner: list", "U.inner: dict", "U.anything: any"}
    assert not bounded_any(Unbounded, ["anything"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{},:é\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[,', max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def counts(value: Any) -> tuple[int, int, int, int]:
    """Containers, members, separators and depth."""
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    sums = [sum(column) for column in list(zip(*inner, strict=True))[:3]] or [0, 0, 0]
    members = len(value) if isinstance(value, dict) else 0
    depth = 1 + max((item[3] for item in inner), default=0)
    return sums[0] + 1, sums[1] + members, sums[2] + max(0, len(value) - 1), depth


def longest_run(value: Any) -> int:
    """Values of the longest list, of those between brackets. Members of objects do not count."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", json.dumps(value))
    return 1 + max(part.count(",") - part.count(":") for part in re.split(r"[][{}]", text))


@given(value=json_values, ascii_only=st.booleans(), cut=st.integers(1, 7))
def test_the_scan_counts_the_parts_of_a_body(value: Any, ascii_only: bool, cut: int) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert from_json(data) == value
    scan = JsonScan()
    for start in range(0, len(data), cut):
        scan.feed(data[start : start + cut])
    containers, members, elements, depth = counts(value)
    assert (scan._containers, scan._members, scan._elements, scan._depth) == (2 * containers, members, elements, 0)
    run = longest_run(value)
    for long_list in (2, 3, 4):
        scan = JsonScan(long_list=long_list)
        for start in range(0, len(data), cut):
            scan.feed(data[start : start + cut])
        assert scan.longest_list == (run if run > long_list else 0)
    deep = JsonScan()
    with pytest.raises(JsonLimitError, match="nested deeper"):
        deep.feed(b"[" * (MAX_DEPTH - depth + 1) + data)
    JsonScan().feed(b"[" * (MAX_DEPTH - depth) + data)


NUMBERS = ("NaN", "Infinity", "-Infinity")
WITH_NUMBERS: list[tuple[str, str]] = [
    ("/v1/completions", '{"model": "smollm2", "prompt": "x", "temperature": %s}'),
    ("/v1/completions", '{"model": "smollm2", "prompt": "x", "logit_bias": {"5": %s}}'),
    ("/v1/completions", '{"model": "smollm2", "prompt": "x", "metadata": {"any": [%s]}}'),
    ("/v1/completions", '{"model": "smollm2", "prompt": "x", "guided_json": {"maximum": %s}}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}'),
    (
        "/v1/chat/completions",
        '{"model": "smollm2", "messages": [{"role": "user", "content": "x"}], '
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]}',
    ),
    ("/v1/responses", '{"model": "smollm2", "input": "x", "metadata": {"a": %s}}'),
    ("/v1/messages", '{"model": "smollm2", "max_tokens": 1, "messages": [], "metadata": {"a": %s}}'),
    ("/v1/embeddings", '{"model": "smollm2", "input": [%s]}'),
    ("/v1/tokenize", '{"model": "smollm2", "prompt": "x", "a": %s}'),
]


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_body_has_finite_numbers(running: Any, number: str) -> None:
    for path, body in WITH_NUMBERS:
        content = (body % number).encode()
        reply = await running.http.post(path, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (path, reply.text)
        assert "not valid JSON: it has NaN, Infinity or" in reply.text, (path, reply.text)
    # JSON, but more than a float holds.
    for path, body in (WITH_NUMBERS[3], WITH_NUMBERS[5]):
        content = (body % "1e999").encode()
        reply = await running.http.post(path, content=content, headers={"content-type": "application/json"})
        assert (reply.status_code, "not JSON compliant" in reply.text) == (400, True), reply.text
    assert not running.backend.requests


async def test_json_in_strings_of_a_body_has_finite_numbers(running: Any) -> None:
    reply = await running.post("/v1/completions", {**COMPLETION, "guided_json": '{"maximum": Infinity}'})
    assert reply.status_code == 400
    assert "the JSON schema is not valid JSON: it has NaN, Infinity or" in reply.text


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("cut", range(1, 8))
def test_a_number_is_found_in_pieces_of_any_size(number: str, cut: int) -> None:
    text = f'{{"NaN": "Infinity \\" NaN", "a": {number}}}'.encode()
    assert from_json(text)["NaN"] == 'Infinity " NaN'

    def feed(data: bytes) -> None:
        scan = JsonScan()
        for start in range(0, len(data), cut):
            scan.feed(data[start : start + cut])

    feed(text.replace(f" {number}}}".encode(), b" 1.5E3}"))
    with pytest.raises(NotJsonError):
        feed(text)


TOO_COMPLEX: list[tuple[str, bytes]] = [
    ("depth", b'{"model": "smollm2", "metadata": %b}' % (b"[" * 200 + b"]" * 200)),
    ("objects", b'{"messages": [%b]}' % b",".join([b"{}"] * (MAX_CONTAINERS + 1))),
    ("members", b"{%b}" % b",".join(b'"%x": 1' % i for i in range(MAX_CONTAINERS + 1))),
    (
        "elements",
        b'{"metadata": [%b]}' % b",".join([b"[%b]" % b",".join([b"1"] * 8000)] * (guards.MAX_ELEMENTS // 8000 + 1)),
    ),
    ("brackets", b"]" * (3 * MAX_CONTAINERS)),
]


async def test_a_body_of_too_many_parts_is_rejected_before_it_is_parsed(
    running: Any, subtests: pytest.Subtests
) -> None:
    for name, body in TOO_COMPLEX:
        with subtests.test(name=name):
            reply = await running.http.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "body_too_complex")
    assert (await running.post("/v1/completions", COMPLETION)).status_code == 200


DEEP = "[" * 5000 + "]" * 5000
DEEP_OBJECT = '{"a":' * 5000 + "1" + "}" * 5000
WIDE = "[" + "[]," * (MAX_CONTAINERS // 2 - 200) + "[]]"
CALL = {"id": "a", "type": "function"}

JSON_IN_TEXT: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {**COMPLETION, "guided_json": DEEP}, "guided_json"),
    ("completions", {**COMPLETION, "guided_json": DEEP_OBJECT}, "guided_json"),
    ("completions", {**COMPLETION, "structured_outputs": {"json": DEEP_OBJECT}}, "structured_outputs"),
    ("completions", {**COMPLETION, "guided_json": '{"a": %s}' % ("[]," * 70_000)}, "guided_json"),
    ("completions", {**COMPLETION, "guided_json": '{"a": ' + "9" * 10_000 + "}"}, "guided_json"),
    ("completions", {**COMPLETION, "guided_json": {"const": 1 << 70}}, "guided_json"),
    (
        "chat/completions",
        {
            **CHAT,
            "messages": [
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": DEEP_OBJECT}}]}
            ],
        },
        "messages",  # the text of the arguments, which are not parsed, is too long
    ),
    (
        "chat/completions",
        {
            **CHAT,
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": ' + WIDE + "}"}}],
                }
            ]
            * 3,
        },
        "messages",
    ),
]


async def test_json_in_a_string_is_bounded_like_the_body(running: Any, subtests: pytest.Subtests) -> None:
    for path, body, param in JSON_IN_TEXT:
        with subtests.test(param=param, body=str(body)[:200]):
            reply = await running.post(f"/v1/{path}", body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert running.backend.requests == []


EVERYTHING: dict[str, Any] = {
    "model": "smollm2",
    "seed": 5,
    "stop_token_ids": list(range(1024)),
    "logit_bias": {str(token): 1 for token in range(1024)},
    "stop": [f"{place}" * 100 for place in range(64)],
    "max_tokens": 1,
}
"""Parameters of the largest allowed sizes. Choices are sampled, so each has its own seed."""


async def test_choices_share_parameters_that_are_validated_once(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = itertools.count()
    validate = SamplingParams.validate

    def counted(params: SamplingParams) -> None:
        next(checks)
        validate(params)

    monkeypatch.setattr(SamplingParams, "validate", counted)
    for stream in (False, True):
        running.backend.requests.clear()
        jumps: list[int] = []
        watching = asyncio.create_task(watch(running.backend.requests, jumps))
        body = {**EVERYTHING, "prompt": [[5]] * 256, "n": 4, "stop": [], "stream": stream}
        reply = await running.post("/v1/completions", body)
        watching.cancel()
        assert reply.status_code == 200, reply.text
        params = [params for _, params in running.backend.requests]
        assert len(params) == 1024
        assert len({id(one.stop_token_ids) for one in params}) == len({id(one.logit_bias) for one in params}) == 1
        assert len({one.seed for one in params}) == 4
        assert next(checks) <= 3
        # Other requests run while these are started.
        assert sum(jumps) == 1024
        assert max(jumps) <= 16


async def watch(requests: list[Any], jumps: list[int]) -> None:
    """Note by how much `requests` grows between two iterations of the event loop."""
    while True:
        before = len(requests)
        await asyncio.sleep(0)
        if len(requests) > before:
            jumps.append(len(requests) - before)


async def test_a_small_body_cannot_make_the_server_send_much(running: Any) -> None:
    for fields in (
        {**EVERYTHING, "prompt": [[5]] * 1024, "stop": ["é" * 1000 + str(place) for place in range(64)]},
        {**COMPLETION, "guided_choice": ["x" * 50_000], "n": 128, "prompt": ["a"] * 8},
    ):
        reply = await running.post("/v1/completions", fields)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "request_too_large")
    assert running.backend.requests == []


async def test_long_values_are_not_echoed(running: Any) -> None:
    long = "m\x1b[31m" * 10_000
    replies = [
        await running.post("/v1/completions", {**COMPLETION, "model": long}),
        await running.post("/v1/completions", {**COMPLETION, "temperature": long}),
        await running.post("/v1/completions", {**COMPLETION, "temperature": [1] * 100_000}),
        await running.http.get("/v1/models/" + "%1b" * 1000),
        await running.http.get("/" + "%1b" * 1000),
    ]
    for reply in replies:
        assert 400 <= reply.status_code < 500
        message = reply.json()["error"]["message"]
        assert len(message) < 600
        assert "\x1b" not in message
    ignored = (await running.post("/v1/completions", {**COMPLETION, long: 1})).headers["x-ignored-fields"]
    assert len(ignored) == 64
    assert "\x1b" not in ignored


def test_the_bodies_have_the_bounds_of_the_sampling_parameters() -> None:
    """The only differences are values that the server translates or cuts, and the limits of OpenAI's API."""
    translated = {("top_k", -1), ("seed", -(1 << 63)), ("max_tokens", 0)}
    of_parameter = {"num_tokens_to_generate": "max_tokens", "top_n_logprobs": "logprobs"}
    for name, rule in ((name, item.rule) for name, item in PARAMETERS.items()):
        field = of_parameter.get(name, name)
        if rule.bounds is None or field not in CompletionRequest.model_fields or field == "logit_bias":
            continue
        schema = str(CompletionRequest.model_json_schema()["properties"][field])
        low = re.search(r"'minimum': (-?[0-9.]+)", schema)
        high = re.search(r"'maximum': (-?[0-9.]+)", schema)
        assert low is not None, f"{field} has no minimum"
        assert float(low[1]) == rule.bounds.minimum or (field, int(low[1])) in translated
        assert field == "max_tokens" or (high is not None and float(high[1]) <= float(rule.bounds.maximum))
