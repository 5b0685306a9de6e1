"""The built-in model behind `megatron serve`, through the openai SDK."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pydantic
import pytest
from eventually import LONG_SECONDS

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 12}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[psutil.Process, openai.OpenAI]]:
    command = [sys.executable, "-m", "megatron_runtime.cli", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if ready := re.search(r"ready in [\d.]+ s: \S+ at (\S+)", line):
            with openai.OpenAI(base_url=ready[1], api_key="any", max_retries=0) as client:
                yield psutil.Process(process.pid), client
            break
    else:
        pytest.fail(f"it never became ready:\n{said}")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 0


@pytest.fixture
def client(served: tuple[psutil.Process, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def test_it_answers_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    text = client.chat.completions.create(**fields).choices[0].message.content
    assert "Paris" in text
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_log_probs_name_the_likeliest_tokens_and_score_the_prompt(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == reply.choices[0].message.content
    for entry in content:
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert sum(math.exp(rival.logprob) for rival in entry.top_logprobs) <= 1.0001
    prompt = "The capital of France is"
    echoed = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=0, logprobs=0, echo=True)
    scores = echoed.choices[0].logprobs.token_logprobs
    assert (echoed.choices[0].text, scores[0], len(scores)) == (prompt, None, 5)
    # The prompt's token is scored as if the model had just written it.
    written = client.completions.create(model=MODEL, prompt=f"{prompt} Paris", max_tokens=0, logprobs=0, echo=True)
    answered = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=1, logprobs=0)
    assert answered.choices[0].text == " Paris"
    assert written.choices[0].logprobs.token_logprobs[-1] == pytest.approx(
        answered.choices[0].logprobs.token_logprobs[0], abs=0.05
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_follows_the_schema(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    if stream:
        parts = [
            call.function
            for chunk in client.chat.completions.create(**fields, stream=True)
            for call in chunk.choices[0].delta.tool_calls or ()
        ]
        name, arguments = parts[0].name, "".join(part.arguments for part in parts)
    else:
        called = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
        name, arguments = called.name, called.arguments
    assert name == "get_weather"
    given = json.loads(arguments)
    assert list(given) == ["city"]
    assert len(given["city"]) <= 12


@pytest.mark.parametrize("calls", [False, True])
def test_with_tools_and_a_json_format_an_answer_is_a_call_or_json(client: openai.OpenAI, calls: bool) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=12)

    class Person(pydantic.BaseModel):
        age: int = pydantic.Field(ge=0, le=99)

    # The first character decides, and the bias decides the first character.
    begins = client.post("../tokenize", body={"model": MODEL, "prompt": "<"}, cast_to=dict)["tokens"]
    reply = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather)],
        parallel_tool_calls=False,
        response_format=Person,
        logit_bias={str(begins[0]): 100 if calls else -100},
        max_tokens=120,
        n=2,
    )
    for choice in reply.choices:
        if calls:
            (call,) = choice.message.tool_calls or ()
            assert isinstance(call.function.parsed_arguments, Weather)
        else:
            assert isinstance(choice.message.parsed, Person)
        assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_answers_follow_the_requested_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=form, max_tokens=60, temperature=0
    )
    assert isinstance(json.loads(reply.choices[0].message.content)["age"], int)
    year = client.completions.create(
        model=MODEL, prompt="The year is", max_tokens=10, extra_body={"guided_regex": " [0-9]{4}"}
    )
    assert re.fullmatch(" [0-9]{4}", year.choices[0].text)
    chosen = client.completions.create(
        model=MODEL, prompt="Is water wet?", max_tokens=10, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in ("yes", "no")


def test_an_invalid_structured_output_names_its_field(client: openai.OpenAI) -> None:
    for fields in ({"guided_regex": "("}, {"guided_json": {"type": "nonsense"}}, {"guided_grammar": "start: nothing"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", max_tokens=10, extra_body=fields)
        assert caught.value.param == next(iter(fields))


def test_bad_words_are_in_no_answer(client: openai.OpenAI) -> None:
    def texts(**extra: Any) -> list[str]:
        fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 30, "extra_body": extra}
        chat = client.chat.completions.create(messages=QUESTION, **fields).choices[0].message.content
        prompt = "The capital of France is"
        stream = client.completions.create(prompt=prompt, stream=True, **fields)
        return [chat or "", "".join(chunk.choices[0].text for chunk in stream)]

    for text, other in zip(texts(), texts(bad_words=["Paris"]), strict=True):
        assert "Paris" in text
        assert len(other.split()) > 5
        assert "Paris" not in other
    reply = client.completions.create(
        model=MODEL,
        prompt="The capital of France is",
        temperature=0,
        max_tokens=1,
        logprobs=1,
        extra_body={"bad_words": ["Paris"]},
    )
    scores = reply.choices[0].logprobs
    likeliest = max(scores.top_logprobs[0], key=scores.top_logprobs[0].get)
    assert likeliest == " Paris" != scores.tokens[0], "the model's own log-probabilities, as with logit_bias"
    allowed = texts(bad_words=["Paris"], guided_choice=["Paris"])
    assert allowed == ["Paris", "Paris"], "structured output allows no others"


def test_choices_of_a_seed_differ_and_repeat_and_bias_decides(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        reply = client.completions.create(model=MODEL, prompt="Once", n=3, seed=seed, max_tokens=8)
        return [choice.text for choice in reply.choices]

    first = texts(5)
    assert len(set(first)) == 3
    assert texts(5) == first
    assert texts(-8) != first
    biased = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, temperature=0, logit_bias={"260": 100})
    assert biased.choices[0].text == " the the the"
    stopped = client.completions.create(model=MODEL, prompt="1 2 3 4 5 6", temperature=0, max_tokens=30, stop=" 9")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" 7 8", "stop")


SHOT: list[Any] = [
    {"role": "user", "content": "How is the weather in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "user", "content": "How will the weather in Lisbon be tomorrow?"},
]
"""An earlier call, which the model imitates."""
FORECAST = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["rain", "wind"]},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 9},
            "minItems": 4,
            "maxItems": 4,
        },
    },
    "required": ["place", "kind", "days"],
}
"""Nothing in the conversation has such arguments."""


def forecast(client: openai.OpenAI, *, stream: bool, on_begin: Callable[[], object] = lambda: None) -> str:
    """Return the arguments of the call that the model chose to make."""
    tools: Any = [{"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]
    fields: dict[str, Any] = {"model": MODEL, "messages": SHOT, "tools": tools, "temperature": 0, "max_tokens": 100}
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.function.name == "forecast"
        return call.function.arguments
    names, arguments = [], ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments
            if len(arguments) > 10:
                on_begin()
    assert names == ["forecast"]
    return arguments


def fits(arguments: str) -> bool:
    value = json.loads(arguments)
    return (
        list(value) == ["place", "kind", "days"]
        and len(value["place"]) <= 12
        and value["kind"] in ("rain", "wind")
        and len(value["days"]) == 4
        and all(1 <= day <= 9 for day in value["days"])
    )


def test_a_call_that_the_model_chooses_to_make_fits_the_schema(client: openai.OpenAI) -> None:
    arguments = forecast(client, stream=False)
    assert fits(arguments)
    assert forecast(client, stream=True) == arguments


def test_a_call_is_the_same_though_its_engine_is_killed(served: tuple[psutil.Process, openai.OpenAI]) -> None:
    process, client = served
    killed: list[int] = []

    def kill() -> None:
        if not killed:
            [engine] = [child for child in process.children() if "engine" in child.cmdline()]
            killed.append(engine.pid)
            engine.kill()

    undisturbed = forecast(client, stream=False)
    assert forecast(client, stream=True, on_begin=kill) == undisturbed
    assert killed
    assert fits(undisturbed)
