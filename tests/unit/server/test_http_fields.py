"""Which fields a request body may have, what each becomes, and what is said of the others."""

from __future__ import annotations

import ast
import itertools
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
from megatron_runtime.server.openai.jobs import GUIDED_FIELDS, Options, Prompt, jobs_of, model_defaults
from megatron_runtime.server.openai.schema import (
    Body,
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    StructuredOutputs,
    only,
)
from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.loader import tokenizer_from_directory

HI = [{"role": "user", "content": "Hi"}]
REQUIRED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi", "max_tokens": 1},
    "chat/completions": {"messages": HI, "max_tokens": 1},
    "responses": {"input": "Hi", "max_output_tokens": 1},
    "messages": {"messages": HI, "max_tokens": 1},
    "messages/count_tokens": {"messages": HI},
    "embeddings": {"input": "Hi"},
    "classify": {"input": "Hi"},
    "pooling": {"input": "Hi"},
    "score": {"queries": "Hi", "documents": "you"},
    "rerank": {"query": "Hi", "documents": ["you"]},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [1]},
}
READ_AS_A_WHOLE = {StructuredOutputs, CalledFunction}
NOT_OFFERED = [(path, name) for path, body in BODIES.items() for name in body.policy.not_offered or ()]


@pytest.fixture
def running(running: Any) -> Any:
    """A server of all routes: of engines that generate, and of others that score pairs of texts."""
    running.backend.tasks = ("classify", "generate")
    return running


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
    assert set(values) | {"logit_bias", "stop_token_ids", "allowed_token_ids"} == set(PARAMETER_OF)
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
    assert all(1 <= len(name) <= 64 for name in shown)
    assert header == header.strip()
    assert bool(header) is bool(names)


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


async def test_a_field_that_is_not_offered_is_rejected_if_it_asks_for_something(
    running: Any, subtests: pytest.Subtests
) -> None:
    for path, name in NOT_OFFERED:
        with subtests.test(path=path, name=name):
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


async def test_fields_without_effect_take_any_value(running: Any, subtests: pytest.Subtests) -> None:
    for path in REQUIRED:
        with subtests.test(path=path):
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
            {"role": "user", "content": "Hi", "type": "text", "tool_call_id": "", "reasoning_content": "Hm", **extra},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], **extra},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1", **extra}], **extra},
        ],
        "tools": [{"function": function, **extra}],
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


async def test_a_schema_is_enforced_in_every_place_where_clients_write_it(running: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format_ in (
        {"type": "json_object", "schema": schema, "strict": True},
        {"type": "json_schema", "schema": {**schema, "required": None, "additionalProperties": None}, "name": "x"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "other": 1}},
    ):
        reply = await running.chat(response_format=format_)
        assert reply.status_code == 200, reply.text
        closed = {**schema, "additionalProperties": False}
        assert running.backend.requests[-1][1].structured_output == {"type": "json_schema", "value": closed}
    await running.chat(response_format={"type": "json_object"})
    assert running.backend.requests[-1][1].structured_output == {"type": "json_object", "value": None}


def test_completions_and_chat_have_the_same_common_fields() -> None:
    common = CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    assert common >= {"model", "temperature", "stop", "n", "stream", "response_format", "return_token_ids"}


# --- the fields of vLLM ---------------------------------------------------------------------------------------------

VLLM_GENERATION: dict[str, Any] = {
    "model": None,
    "frequency_penalty": None,
    "logit_bias": None,
    "n": 1,
    "presence_penalty": None,
    "response_format": None,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "thinking_token_budget": None,
    "user": None,
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "watermarking": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "echo": False,
    "structured_outputs": None,
    "priority": 0,
    "request_id": "any",
    "session_id": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "mm_payload": "tensors",
    "return_mm_kwargs": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "stream_interval": None,
}
VLLM_FIELDS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **VLLM_GENERATION,
        "messages": HI,
        "logprobs": False,
        "top_logprobs": 0,
        "max_tokens": None,
        "max_completion_tokens": None,
        "tools": None,
        "tool_choice": "none",
        "reasoning_effort": None,
        "include_reasoning": True,
        "parallel_tool_calls": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "documents": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "media_io_kwargs": None,
        "mm_processor_kwargs": None,
        "return_prompt_text": None,
    },
    "completions": {
        **VLLM_GENERATION,
        "prompt": "Hi",
        "logprobs": None,
        "max_tokens": 16,
        "suffix": None,
        "prompt_embeds": None,
        "add_special_tokens": True,
    },
}
"""The fields of ChatCompletionRequest and CompletionRequest of vLLM 0.32.0, with their defaults."""


@pytest.mark.parametrize("path", VLLM_FIELDS)
async def test_every_field_of_vllm_is_known_and_its_default_is_accepted(running: Any, path: str) -> None:
    body = BODIES[path]
    known = {*body.model_fields, *body.policy.without_effect, *(body.policy.not_offered or ())}
    assert VLLM_FIELDS[path].keys() <= known
    reply = await running.post(f"/v1/{path}", VLLM_FIELDS[path])
    assert reply.status_code == 200, reply.text
    assert "x-ignored-fields" not in reply.headers


async def test_code_and_templates_of_a_client_are_rejected(running: Any, subtests: pytest.Subtests) -> None:
    names = ("logits_processors", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs")
    for path, name in [("chat/completions", "chat_template"), *itertools.product(VLLM_FIELDS, names)]:
        with subtests.test(path=path, name=name):
            for value in ({"a": 1}, "{{ 1 }}", ["x"]):
                reply = await running.post(f"/v1/{path}", {**REQUIRED[path], name: value})
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert running.backend.requests == []


async def test_allowed_tokens_reach_the_engine_and_are_checked(running: Any) -> None:
    for path in ("chat/completions", "completions"):
        await running.post(f"/v1/{path}", {**REQUIRED[path], "allowed_token_ids": [5, 9]})
        assert running.backend.requests[-1][1].allowed_token_ids == [5, 9]
        for wrong in ([], [49152], [-1], "5"):
            reply = await running.post(f"/v1/{path}", {**REQUIRED[path], "allowed_token_ids": wrong})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"].startswith("allowed_token_ids")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": 100_000}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, slice(-12, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1000}, slice(-1, None)),
        ({"truncate_prompt_tokens": None}, slice(None)),
    ],
)
async def test_a_prompt_is_truncated_on_request(start: Any, fields: dict[str, Any], kept: slice) -> None:
    running = await start(max_sequence_length=16)
    short = "truncate_prompt_tokens" in fields and fields["truncate_prompt_tokens"] != -1
    text = "one two three four five six" if short else "word " * 3000
    tokens = running.tokenizer.encode(text)
    reply = await running.post("/v1/completions", {"prompt": text, "max_tokens": 1, **fields})
    assert reply.status_code == 200, reply.text
    assert running.backend.requests[-1][0] == tokens[kept]
    reply = await running.post("/v1/completions", {"prompt": text, "max_tokens": 1, "echo": True, **fields})
    assert reply.json()["choices"][0]["text"].startswith(running.tokenizer.decode(tokens[kept]))


async def test_a_conversation_is_truncated_on_request(running: Any) -> None:
    await running.chat("Hello there")
    await running.chat("Hello there", truncate_prompt_tokens=5)
    (whole, _), (cut, _) = running.backend.requests
    assert cut == whole[-5:]
    reply = await running.post(
        "/v1/embeddings", {"input": ["one two three four five", "six"], "truncate_prompt_tokens": 2}
    )
    assert reply.status_code == 200
    prompts = [tokens for tokens, _ in running.backend.requests[2:]]
    assert prompts == [running.tokenizer.encode("one two three four five")[:2], running.tokenizer.encode("six")]


async def test_special_tokens_before_a_text_are_a_choice(start: Any, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    running = await start()
    calls: list[bool] = []
    encode = type(tokenizer).encode

    def recorded(self: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
        if "Hi" in text:
            calls.append(add_special)
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(type(tokenizer), "encode", recorded)
    for value, completion, chat in ((None, True, False), (True, True, True), (False, False, False)):
        calls.clear()
        await running.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "add_special_tokens": value})
        await running.chat(add_special_tokens=value, max_tokens=1)
        assert calls == [completion, chat]


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_of_an_answer_are_a_choice(running: Any, tokenizer: Tokenizer, stream: bool) -> None:
    running.backend.answer = "one <|im_start|>two<|im_end|>"
    texts = {}
    for skip in (None, True, False):
        fields = {"skip_special_tokens": skip, "max_tokens": 50, "ignore_eos": True, "stream": stream}
        if stream:
            chunks = await running.openai.chat.completions.create(
                model="smollm2",
                messages=HI,
                temperature=0,
                max_tokens=5,
                stream=True,
                extra_body={"skip_special_tokens": skip},
            )
            texts[skip] = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        else:
            reply = await running.chat(**fields)
            texts[skip] = reply.json()["choices"][0]["message"]["content"]
    assert "<|im_start|>" in texts[False]
    assert texts[None] == texts[True] == texts[False].replace("<|im_start|>", "").replace("<|im_end|>", "")


async def test_log_probabilities_may_name_tokens_by_id(running: Any) -> None:
    fields = {"max_tokens": 3, "return_tokens_as_token_ids": True, "return_token_ids": True}
    chat = (await running.chat(logprobs=True, top_logprobs=1, **fields)).json()["choices"][0]
    names = [f"token_id:{token}" for token in chat["token_ids"]]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == names
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in chat["logprobs"]["content"])
    body = {"prompt": "Hi", "temperature": 0, "logprobs": 1, **fields}
    completion = (await running.post("/v1/completions", body)).json()["choices"][0]
    assert completion["logprobs"]["tokens"] == [f"token_id:{token}" for token in completion["token_ids"]]
    assert all(name.startswith("token_id:") for top in completion["logprobs"]["top_logprobs"] for name in top)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("log_probs", [None, 1, 5])
async def test_log_probabilities_of_the_prompt(running: Any, top: int, log_probs: int | None) -> None:
    tokens = running.tokenizer.encode("one two three")
    body = {"prompt": "one two three", "max_tokens": 2, "temperature": 0, "prompt_logprobs": top}
    choice = (await running.post("/v1/completions", {**body, "logprobs": log_probs})).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip(tokens[1:], others, strict=True)] == [True] * len(others)
    assert all(top <= len(entry) <= top + 1 for entry in others)
    for token, entry in zip(tokens[1:], others, strict=True):
        assert entry[str(token)]["decoded_token"] == running.tokenizer.decode([token])
        assert [item["rank"] for item in entry.values() if item["rank"]] == list(range(1, top + 1))
    if log_probs is None:
        assert choice["logprobs"] is None
    else:
        assert all(len(entry) == log_probs + 1 for entry in choice["logprobs"]["top_logprobs"])
    chat = (await running.chat(prompt_logprobs=top, max_tokens=1)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["logprobs"] is None
    reply = await running.chat(prompt_logprobs=top, stream=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_an_interval_of_a_stream_has_two_names(running: Any) -> None:
    for fields in ({"stream_interval": 7}, {"streaming_interval": 7}, {"streaming_interval": 7, "stream_interval": 9}):
        await running.chat(stream=True, **fields)
        assert running.backend.requests[-1][1].streaming_interval == 7


# --- the meaning of sampling ----------------------------------------------------------------------------------------

GREEDY = {"temperature": 0.0, "top_k": 1, "top_p": 0.0, "min_p": 0.0}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": None}
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, NEUTRAL),
    (dict.fromkeys(NEUTRAL), NEUTRAL),
    ({"temperature": 0}, GREEDY),
    ({"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.5}, GREEDY),
    ({"temperature": 1e-6}, GREEDY),
    ({"temperature": 1}, {"temperature": 1.0, "top_k": 0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 0}, GREEDY),  # the most likely token alone; vLLM rejects it
    ({"top_p": 1e-7}, GREEDY),
    ({"top_p": 1e-320}, GREEDY),
    ({"top_p": 1}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),  # 1 keeps all tokens
    ({"top_k": 0}, {"top_k": 0, "temperature": 1.0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 1}, {"top_k": 1}),
    ({"min_p": 0}, {"min_p": 0.0}),
    ({"min_p": 1}, {"min_p": 1.0}),
    ({"repetition_penalty": 1}, {"repetition_penalty": 1.0}),
    ({"presence_penalty": 0, "frequency_penalty": None}, {"presence_penalty": 0.0, "frequency_penalty": 0.0}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
    ({"seed": -1}, {"seed": None}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": (1 << 63) - 1}, {"seed": (1 << 63) - 1}),
    ({"seed": -(1 << 63)}, {"seed": 1 << 63}),
    ({"max_tokens": None}, {"num_tokens_to_generate": None}),  # as many as fit
    ({"max_tokens": 1}, {"num_tokens_to_generate": 1}),
    ({"min_tokens": 0}, {"min_tokens": 0}),
    ({"stop": None}, {"stop_words": None}),
    ({"stop": []}, {"stop_words": None}),
    ({"stop": "a"}, {"stop_words": ["a"]}),
    ({"logit_bias": {}}, {"logit_bias": None}),
    ({"logit_bias": {"5": -100, "6": 100}}, {"logit_bias": {5: -100.0, 6: 100.0}}),
    ({"bad_words": [], "stop_token_ids": []}, {"bad_words": None}),
    ({"ignore_eos": True}, {"termination_id": -1}),
    ({"logprobs": None}, {"return_log_probs": False, "skip_prompt_log_probs": True}),
]
"""Fields of a request, and the sampling parameters of the engine: what vLLM 0.32 means, except where noted."""


@pytest.mark.parametrize(("fields", "expected"), MEANINGS)
def test_a_value_means_what_it_means_to_vllm(
    tokenizer: Tokenizer, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = params_of(tokenizer, **fields)
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.is_greedy is (expected == GREEDY or fields.get("top_k") == 1)


QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "eos": 2}
OF_QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def test_a_generation_config_is_read_as_vllm_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    assert model_defaults(QWEN) == OF_QWEN
    assert model_defaults({"max_new_tokens": 7, "min_p": 0.1, "top_k": -1}) == {
        "num_tokens_to_generate": 7,
        "min_p": 0.1,
        "top_k": 0,
    }
    assert model_defaults({"temperature": None, "do_sample": False, "transformers_version": "5"}) == {}
    assert not caplog.records
    assert model_defaults({"temperature": "hot", "top_k": 1.5, "top_p": 7, "min_p": True, "max_new_tokens": 0}) == {}
    assert [record.message.split(" is ")[0].split(": ")[1] for record in caplog.records] == [
        *("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
    ]


async def test_the_defaults_of_the_model_hold_below_the_request(
    start: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "generation_config", {**QWEN, "max_new_tokens": 9})
    running = await start()

    async def params(path: str = "chat/completions", **fields: Any) -> SamplingParams:
        body = {name: value for name, value in REQUIRED[path].items() if not name.startswith("max_")}
        reply = await running.post(f"/v1/{path}", {**body, **fields})
        assert reply.status_code == 200, reply.text
        return running.backend.requests[-1][1]

    def values(found: SamplingParams) -> dict[str, Any]:
        return {name: getattr(found, name) for name in OF_QWEN}

    for path, fields in (
        ("chat/completions", {}),
        ("completions", {"temperature": None}),
        ("responses", {}),
        ("messages", {"max_tokens": 5}),
    ):
        assert values(await params(path, **fields)) == OF_QWEN
    assert (await params()).num_tokens_to_generate == 9
    assert (await params("completions")).num_tokens_to_generate == 16
    assert (await params(max_tokens=3)).num_tokens_to_generate == 3
    assert values(await params(top_k=0, top_p=1, repetition_penalty=1)) == {
        "temperature": 0.6,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }
    greedy = await params(temperature=0)
    assert greedy.is_greedy
    assert greedy.repetition_penalty == 1.05
    answer = (await running.post("/v1/responses", REQUIRED["responses"])).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    neutral = await start(generation_config="none")
    await neutral.post("/v1/chat/completions", REQUIRED["chat/completions"])
    found = neutral.backend.requests[-1][1]
    assert {name: getattr(found, name) for name in NEUTRAL} == NEUTRAL


def test_the_tokenizer_of_a_directory_has_its_generation_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    assert tokenizer_from_directory(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 1, "eos_token_id": [2]}')
    assert tokenizer_from_directory(tmp_path).generation_config["top_k"] == 1
