"""vLLM's parsers read the calls that real chat templates write, by the names of our table.

The templates are those of llama.cpp's tests (support/chat_templates.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from chat_templates import chat_templates

from megatron_runtime.server.formats.reasoning import FORMATS
from megatron_runtime.server.formats.recognition import (
    opens_reasoning,
    reasoning_format_of,
    tool_format_of,
    written_calls,
)
from megatron_runtime.server.formats.vllm_parsers import Parsers, parsers_of
from megatron_runtime.tokenization import ChatTemplate
from megatron_runtime.tokenization.vocabulary import BYTE_OF_CHARACTER

from .conftest import has_formats

pytestmark = pytest.mark.skipif(not has_formats(), reason="servers with this version of vLLM use our formats")

TYPES: Mapping[str, str] = {
    "GLM-4.6": "glm4_moe",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "MiniMax-M2": "minimax_m2",
    "Qwen-Qwen3-0.6B": "qwen3",
    "Qwen3.5-4B": "qwen3_5",
    "StepFun3.5-Flash": "step3p5",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "ibm-granite-granite-4.0": "granitemoehybrid",
    "ibm-granite-granite-4.1": "granitemoehybrid",
    "inclusionai-ling-3.0-flash": "bailing_moe_v3",
    "poolside-Laguna-S-2.1": "laguna",
    "poolside-Laguna-XS-2.1": "laguna",
    "poolside-Laguna-XS.2": "laguna",
}
"""`model_type` of the models of templates whose parser it chooses."""
NONE = "no parser of vLLM reads the calls, whole and streamed"
AFTER_TEXT = "vLLM's parser of this form, hunyuan_a13b, does not find a call after a text in a stream"
AT_THE_END = "the parser finds a call at the end of the answer only, and the template ends a message with a marker"
WITH_ID = "the parser takes the id of a call for a part of its name"
OF_VOCABULARY = "the parser needs the vocabulary of gpt-oss, with which test_harmony.py reads it"
UNREAD: Mapping[str, str] = {
    "Apriel-1.6-15b-Thinker-fixed": AFTER_TEXT,
    "CohereForAI-c4ai-command-r-plus-tool_use": NONE,
    "GigaChat3-10B-A1.8B": AT_THE_END,
    "GigaChat3.1-10B-A1.8B": AT_THE_END,
    "MiniMax-M1": NONE,
    "Mistral-Small-3.2-24B-Instruct-2506": WITH_ID,
    "NVIDIA-Nemotron-Nano-v2": NONE,
    "meetkai-functionary-medium-v3.1": NONE,
    "meetkai-functionary-medium-v3.2": NONE,
    "openai-gpt-oss-120b": OF_VOCABULARY,
    "unsloth-Apriel-1.5": AFTER_TEXT,
    "upstage-Solar-Open-100B": NONE,
}
"""Templates whose calls our parsers read, and why vLLM's do not. Each reason has a test."""
SINGLE = ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct")
"""Templates that reject several calls."""
_SUFFIX = ":opensource"
"""`token_suffix` in tokenizer_config.json of Hunyuan 3; other models have none."""
FURTHER = (
    "<|python_tag|>",
    *(f"<{name}{_SUFFIX}>" for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")),
    *(f"</{name}{_SUFFIX}>" for name in ("tool_calls", "tool_call", "arg_key", "arg_value")),
)
"""Tokens of vocabularies that no template contains as they are."""
_MARKER = re.compile(r"</?[|｜]?[\w:|｜▁ =+-]+[|｜]?>|\[/?[A-Z_]+\]|<\|[^>\n]{1,30}\|>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city."},
                    "days": {"type": "integer", "description": "Days."},
                },
            },
        },
    }
    for name in ("get_weather", "other_tool")
]
CALLS = [("get_weather", {"city": "Paris, 東京", "days": 3}), ("other_tool", {"city": "Rome", "days": -1})]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(chat_templates()[name], special={"bos_token": "<s>", "eos_token": "</s>"})


def answers_of(name: str, number: int) -> list[str]:
    return list(dict.fromkeys(written_calls(template_of(name), CALLS[:number], tools=TOOLS)))


def writes_calls(name: str) -> bool:
    _, how = tool_format_of(template_of(name))
    return how == "written by the chat template"


def parsers(name: str) -> Parsers:
    """Return the parsers that our table chooses for the model of a template."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    template = template_of(name)
    tools, _ = tool_format_of(template)
    reasoning = reasoning_format_of(template)
    return parsers_of(
        TYPES.get(name, ""),
        None if tools is None else tools.name,
        next((name for name, format_ in FORMATS.items() if format_ is reasoning), None),
        is_open=opens_reasoning(template, reasoning),
        installed=(ToolParserManager.list_registered(), ReasoningParserManager.list_registered()),
    )


def tokenizer_of(texts: Sequence[str]) -> Any:
    """Return a tokenizer of bytes, with the markers in the texts as special tokens."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: id_ for id_, character in enumerate(sorted(BYTE_OF_CHARACTER))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    markers = {marker for text in texts for marker in _MARKER.findall(text)}
    backend.add_special_tokens(["</s>", *sorted(markers | set(FURTHER))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", token_suffix=_SUFFIX)


def read(name: str, answer: str, *, streams: bool, parser_name: str | None = None) -> list[tuple[str, Any]]:
    """Return the calls that a parser finds in an answer. parser_name: None uses the parser of the table."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    tokenizer = tokenizer_of([chat_templates()[name], answer])
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "auto"}
    )
    make = ParserManager.get_parser(
        tool_parser_name=parser_name or parsers(name).tools, enable_auto_tools=True, tokenizer=tokenizer
    )
    assert make is not None
    parser = make(tokenizer, request.tools)
    request = parser.adjust_request(request)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    if not streams:
        _, _, found = parser.parse(answer, request, enable_auto_tools=True, model_output_token_ids=tokens)
        return [(call.name, json.loads(call.arguments)) for call in found or ()]
    calls: list[list[str]] = []
    shown = ""
    for place, _ in enumerate(tokens):
        text = tokenizer.decode(tokens[: place + 1]).rstrip("\ufffd")
        delta = parser.parse_delta(
            text[len(shown) :], tokens[place : place + 1], request, [0], finished=place == len(tokens) - 1
        )
        shown = text
        for call in () if delta is None else delta.tool_calls:
            if call.function.name:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments or ""
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_template_that_vllm_does_not_read_is_listed() -> None:
    written = [name for name in chat_templates() if writes_calls(name)]
    assert len(written) >= 58
    assert UNREAD.keys() <= set(written)
    without = {name for name, reason in UNREAD.items() if reason in (NONE, AFTER_TEXT)}
    assert without == {name for name in written if parsers(name).tools is None}


def unread(reason: str) -> Any:
    return pytest.mark.parametrize("name", [name for name, why in UNREAD.items() if why == reason])


def finds(name: str, answer: str, parser_name: str | None, *, streams: bool) -> bool:
    """Return whether a parser finds the first call. One that fails, or needs tokens of another model, does not."""
    try:
        return read(name, answer, streams=streams, parser_name=parser_name) == CALLS[:1]
    except Exception:
        return False


@unread(NONE)
def test_no_parser_of_vllm_reads_the_calls(name: str) -> None:
    from vllm.tool_parsers import ToolParserManager

    for answer in answers_of(name, 1):
        for parser_name in ToolParserManager.list_registered():
            assert not all(finds(name, answer, parser_name, streams=streams) for streams in (False, True)), parser_name


@unread(AFTER_TEXT)
def test_vllms_parser_of_lists_finds_no_call_after_a_text_in_a_stream(name: str) -> None:
    answer = answers_of(name, 1)[0]
    for before, streamed in (("", True), ("I look it up.\n", False)):
        assert finds(name, before + answer, "hunyuan_a13b", streams=False)
        assert finds(name, before + answer, "hunyuan_a13b", streams=True) is streamed


@unread(AT_THE_END)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_vllms_parser_reads_the_calls_of_gigachat_without_the_end_of_the_message(name: str, streams: bool) -> None:
    for answer in answers_of(name, 1):
        call, end, _ = answer.rpartition("<|message_sep|>")
        assert end
        assert finds(name, call, None, streams=streams)
        assert not finds(name, answer, None, streams=streams)


@unread(WITH_ID)
def test_vllms_parser_takes_the_id_of_a_call_for_a_part_of_its_name(name: str) -> None:
    (called, arguments) = read(name, answers_of(name, 1)[0], streams=False)[0]
    assert (called, arguments) == ("get_weather[CALL_ID]call00000", CALLS[0][1])


@unread(OF_VOCABULARY)
def test_vllms_parser_of_gpt_oss_reads_tokens_of_its_vocabulary(name: str) -> None:
    assert parsers(name).tools == "openai"
    with pytest.raises(NotImplementedError, match="HarmonyParser"):
        read(name, answers_of(name, 1)[0], streams=False)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [name for name in chat_templates() if writes_calls(name) and name not in UNREAD])
def test_the_calls_that_a_template_writes_are_read_by_vllm(name: str, streams: bool) -> None:
    for number in (1,) if name in SINGLE else (1, 2):
        answers = answers_of(name, number)
        assert any(read(name, answer, streams=streams) == CALLS[:number] for answer in answers), answers
