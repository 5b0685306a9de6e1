"""Calls are found in what real chat templates write, whatever the division of the text, and nothing of them is lost.

The templates are those of llama.cpp's tests (support/chat_templates.py).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from chat_templates import chat_templates
from soak import SOAK, size

from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Event, Reasoning, Text
from megatron_runtime.server.formats.reasoning import FORMATS, ReasoningUse
from megatron_runtime.server.formats.recognition import reasoning_format_of, tool_format_of, written_calls
from megatron_runtime.server.formats.table import PARSERS, ToolFormat
from megatron_runtime.tokenization import ChatTemplate

RECOGNISED: Mapping[str, str] = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "minimax",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_a",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r_plus",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_a",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3.1-10B-A1.8B": "gigachat3",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "Kimi-K3": "kimi_k3",
    "LFM2.5-8B-A1B": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "minimax",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm45",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm45",
    "meetkai-functionary-medium-v3.1": "functionary_v31",
    "meetkai-functionary-medium-v3.2": "functionary_v32",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "muse-glimmer": "muse",
    "openai-gpt-oss-120b": "gpt_oss",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "glm45",
    "poolside-Laguna-XS-2.1": "glm45",
    "poolside-Laguna-XS.2": "glm45",
    "tencent-Hy3": "hunyuan_v3",
    "unsloth-Apriel-1.5": "minimax",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "upstage-Solar-Open-100B": "solar",
}
"""Format of each template that writes calls."""
NAMED: Mapping[str, tuple[str, str]] = {
    "HuggingFaceTB-SmolLM3-3B": ("hermes", "reads no tools: the server describes them"),
    "LFM2-8B-A1B": ("lfm2", "lists tools, and takes calls as the text of a message"),
    "LFM2.5-Instruct": ("lfm2", "lists tools, and takes calls as the text of a message"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", "reads functions of its own, not tools"),
    "google-gemma-2-2b-it": ("hermes", "reads no tools: the server describes them"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "describes calls, and takes them as the text of a message"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "writes a list as JSON that only llama.cpp's Jinja can write"),
    "llama-cpp-rwkv-world": ("hermes", "reads no tools: the server describes them"),
    "microsoft-Phi-3.5-mini-instruct": ("hermes", "reads no tools: the server describes them"),
}
"""Format of each other template, and why it writes no calls."""
ONE_OF_EACH_FORMAT = size(list({format_: name for name, format_ in RECOGNISED.items()}.values()), soak=[*RECOGNISED])
SINGLE = {
    "GigaChat3-10B-A1.8B": "writes the first call alone",
    "GigaChat3.1-10B-A1.8B": "writes the first call alone",
    "meta-llama-Llama-3.1-8B-Instruct": "rejects several calls",
    "meta-llama-Llama-3.2-3B-Instruct": "rejects several calls",
    "meta-llama-Llama-3.3-70B-Instruct": "rejects several calls",
    "openai-gpt-oss-120b": "writes the first call alone",
}
"""Templates that write one call, and why."""
WITHOUT_TEXT = {
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
}
"""Templates that leave out the text before a call."""

PROPERTIES: dict[str, dict[str, Any]] = {
    "phrase": {"type": "string"},
    "digits": {"type": "string"},
    "quantity": {"type": "integer"},
    "ratio": {"type": "number"},
    "is_on": {"type": "boolean"},
    "nested": {"type": "object", "additionalProperties": {"type": "string"}},
    "items": {"type": "array", "items": {"type": "string"}},
}
for name, schema in PROPERTIES.items():
    schema["description"] = f"The {name}."
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["phrase"], "additionalProperties": False}
NO_PARAMETERS = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "Tells the time.", "parameters": NO_PARAMETERS}},
]
SCHEMAS = {"look_up": PARAMETERS, "now": NO_PARAMETERS}
ARGUMENTS: dict[str, Any] = {
    "phrase": "alpha \"bravo\" 'charlie' <b>naïve</b> 東京 🗼\nsecond line, {delta: 1}",
    "digits": "0123",
    "quantity": -7,
    "ratio": 2.5,
    "is_on": True,
    "nested": {"echo": ["foxtrot", 1, {"golf": "hôtel"}], "india": {"juliett": False}},
    "items": ["kilo", "lima"],
}
WORDS = {word for word in re.findall("[a-z]{4,}", json.dumps(ARGUMENTS)) if word not in ("true", "false")}
UNQUOTED = {"LFM2.5-8B-A1B": "writes strings between single quotes, whatever they contain"}
"""Templates that cannot write a string with a single quote, and why."""
OTHER_FORMS = (
    '\\\\\\"bravo',  # a string with JSON in place of an object
    "{'phrase'",  # an object in place of JSON
    "{{",  # JSON in place of an object
    "<|open|>json",  # JSON in place of an object
    "<|start_header_id|>",  # the header of the message, which the prompt has
)
"""Parts of answers that templates write of arguments in a form that they do not expect, or in a history."""
BEFORE, AFTER, THOUGHT = "Before the call.", "After the calls.", "Thinking about it."

Read = tuple[str, str, list[tuple[str, str]]]


def read(parser: Any, pieces: Iterable[str]) -> Read:
    """Return the reasoning, the text and the calls, put together."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    reasoning, text, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(part):
                reasoning += part
            case Text(part):
                text += part
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(part):
                calls[-1] = (calls[-1][0], calls[-1][1] + part)
    return reasoning, text, calls


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 40)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@cache
def corpus() -> Mapping[str, str]:
    return chat_templates()


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(corpus()[name], special={"bos_token": "<s>", "eos_token": "</s>"})


@cache
def answers_of(name: str, number: int, *, text: str = "") -> list[str]:
    """Return what a template writes of an answer with a number of calls, in each form of the message."""
    written = written_calls(template_of(name), calls_of(name, number), tools=TOOLS, text=text)
    return [answer for answer in dict.fromkeys(written) if not any(part in answer for part in OTHER_FORMS)]


def calls_of(name: str, number: int) -> list[tuple[str, dict[str, Any]]]:
    text = ARGUMENTS["phrase"].replace("'", "") if name in UNQUOTED else ARGUMENTS["phrase"]
    return [("look_up", {**ARGUMENTS, "phrase": text}), ("now", {})][:number]


def format_of(name: str) -> ToolFormat:
    return PARSERS[RECOGNISED[name]]


def read_alike(make: Any, answer: str, *, by_character: bool = SOAK) -> Read:
    """Read an answer whole, in random pieces and maybe character by character. Return what each of them gives."""
    whole = read(make(), [answer])
    if by_character:
        assert read(make(), answer) == whole
    draw = random.Random(answer)
    for _ in range(4):
        assert read(make(), pieces_of(answer, draw)) == whole
    return whole


def test_every_template_of_the_corpus_is_listed() -> None:
    assert sorted(chat_templates()) == sorted([*RECOGNISED, *NAMED])


@pytest.mark.parametrize("name", [*RECOGNISED, *NAMED])
def test_the_format_of_a_template_is_recognised(name: str) -> None:
    format_, how = tool_format_of(template_of(name))
    assert format_ is not None
    writes = how == "written by the chat template"
    assert (format_.name, writes) == ((RECOGNISED[name], True) if name in RECOGNISED else (NAMED[name][0], False))


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_calls_that_a_template_writes_are_read(name: str) -> None:
    for number in (1,) if name in SINGLE else (1, 2):
        answers = answers_of(name, number)
        assert answers
        for answer in answers:
            _, text, calls = read_alike(lambda: format_of(name)(SCHEMAS), answer, by_character=True)
            assert values(calls) == calls_of(name, number), answer
            assert not [word for word in WORDS if word in text]


@pytest.mark.parametrize("name", SINGLE)
def test_a_template_that_writes_one_call_writes_no_more(name: str) -> None:
    assert not [answer for answer in answers_of(name, 2) if "now" in answer]


@pytest.mark.parametrize("name", ONE_OF_EACH_FORMAT)
def test_text_around_calls_is_text(name: str) -> None:
    answers = answers_of(name, 1, text=BEFORE) or answers_of(name, 1)
    assert (name in WITHOUT_TEXT) == all(BEFORE not in answer for answer in answers)
    for answer in answers:
        reasoning, text, calls = read_alike(lambda: format_of(name)(SCHEMAS), f"{answer}{AFTER}")
        assert values(calls) == calls_of(name, 1)
        assert BEFORE not in answer or BEFORE in text + reasoning
        assert AFTER in text or format_of(name).name == "gpt_oss", answer


@pytest.mark.parametrize("name", ONE_OF_EACH_FORMAT)
def test_reasoning_comes_before_calls(name: str) -> None:
    format_ = reasoning_format_of(template_of(name)) or FORMATS["think"]
    opening = "<|channel|>analysis<|message|>" if format_ is FORMATS["gpt_oss"] else format_.opening
    closing = "<|end|>" if format_ is FORMATS["gpt_oss"] else format_.closing
    for answer in answers_of(name, 1)[:1]:
        for is_open in (True, False):
            use = ReasoningUse(format_, (), (), is_open=is_open and format_ is not FORMATS["gpt_oss"])
            begin = "" if use.is_open else opening
            whole = f"{begin}{THOUGHT}{closing}{answer}"
            reasoning, _, calls = read_alike(lambda use=use: use.parser(format_of(name)(SCHEMAS)), whole)
            assert reasoning == THOUGHT
            assert values(calls) == calls_of(name, 1)


@pytest.mark.parametrize("name", ONE_OF_EACH_FORMAT)
def test_nothing_of_a_cut_or_malformed_call_is_lost(name: str) -> None:
    draw = random.Random(name)
    answer = answers_of(name, 1 if name in SINGLE else 2)[-1]
    cuts = [answer[: draw.randrange(len(answer))] for _ in range(40)]
    for _ in range(40):
        begin = draw.randrange(len(answer))
        end = begin + draw.randint(0, 6)
        cuts.append(answer[:begin] + draw.choice(["", "}", '"', "<", " junk "]) + answer[end:])
    for cut in cuts:
        whole = read(format_of(name)(SCHEMAS), [cut])
        assert read(format_of(name)(SCHEMAS), pieces_of(cut, draw)) == whole
        reasoning, text, calls = whole
        shown = " ".join([reasoning, text, *(part for call in calls for part in call)])
        assert not [word for word in WORDS if word in cut and word not in shown], cut
