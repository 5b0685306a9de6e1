"""Grammars of calls: they allow what the chat templates write, and what they allow is read as calls that fit."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from soak import size

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.sampling.grammar_limits import check_structure
from megatron_runtime.server.formats.call_grammars import written_with
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Text
from megatron_runtime.server.formats.recognition import written_calls
from megatron_runtime.server.formats.table import PARSERS, ToolFormat

from .test_chat_templates import ONE_OF_EACH_FORMAT, RECOGNISED, SINGLE, template_of

PROPERTIES: dict[str, Any] = {
    "place": {"type": "string"},
    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "ratio": {"type": "number", "minimum": 0, "maximum": 2},
    "is_on": {"type": "boolean"},
}
WEATHER = {"type": "object", "properties": PROPERTIES, "required": ["place", "days"], "additionalProperties": False}
NOW = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOLS = {"weather": WEATHER, "now": NOW}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"place": 'Łódź "old" town', "unit": "kelvin", "days": 3, "ratio": 0.5, "is_on": True}),
    ("now", {}),
]
ONE_GROUP = {"muse-glimmer": "writes each call as a message of its own"}
"""Templates whose second call the grammar does not allow, and why."""

BYTES = llguidance.LLTokenizer("byte")


def matcher_of(format_: ToolFormat, tools: Any, start: str, *, is_single: bool = False) -> llguidance.LLMatcher:
    grammar = format_.grammar(tools, written_with({}), is_single)
    return matcher(f"start: {grammar.markers[start]}\n{grammar.rules}")


def matcher(text: str) -> llguidance.LLMatcher:
    check_structure({"type": "grammar", "value": text})
    matcher = llguidance.LLMatcher(BYTES, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def starts_of(format_: ToolFormat, tools: Any) -> list[str]:
    return list(format_.grammar(tools, written_with({}), False).markers)


def calls_in(format_: ToolFormat, text: str, tools: Any) -> list[tuple[str, Any]]:
    parser = format_(tools)
    found: list[tuple[str, str]] = []
    for event in (*parser.feed(text), *parser.finish()):
        if isinstance(event, CallBegin):
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize("name", ONE_OF_EACH_FORMAT)
def test_the_grammar_allows_what_the_template_writes(name: str) -> None:
    format_ = PARSERS[RECOGNISED[name]]
    tools = [
        {"type": "function", "function": {"name": key, "description": "Tells.", "parameters": described(TOOLS[key])}}
        for key in TOOLS
    ]
    for number in (1,) if name in SINGLE or name in ONE_GROUP else (1, 2):
        answers = [
            text for text in written_calls(template_of(name), CALLS[:number], tools=tools) if '\\\\\\"old' not in text
        ]
        assert answers
        allowed = [allowed_of(format_, answer) for answer in answers]
        assert CALLS[:number] in [calls_in(format_, text, TOOLS) for text in allowed], answers


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the descriptions that some templates need."""
    properties = {name: {**value, "description": f"The {name}."} for name, value in schema["properties"].items()}
    return {**schema, "properties": properties}


def allowed_of(format_: ToolFormat, answer: str) -> str:
    """Return the longest answer that the grammar allows of what a template writes, which ends with more than that."""
    found = [(answer.find(start), -len(start), start) for start in starts_of(format_, TOOLS) if start in answer]
    if not found:
        return ""
    at, _, start = min(found)
    matcher = matcher_of(format_, TOOLS, start)
    accepted = at
    for place in range(at + len(start), len(answer)):
        if matcher.is_accepting():
            accepted = place
        if not matcher.consume_tokens(BYTES.tokenize_bytes(answer[place].encode())):
            break
    else:
        accepted = len(answer) if matcher.is_accepting() else accepted
    return answer[:accepted]


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("name", PARSERS)
def test_what_a_grammar_allows_is_read_as_calls_that_fit(name: str, is_single: bool) -> None:
    format_, draw = PARSERS[name], random.Random(name)
    for start in starts_of(format_, WALKED):
        for _ in range(size(2, soak=100)):
            rest = walk(matcher_of(format_, WALKED, start, is_single=is_single), draw)
            check_calls(calls_in(format_, start + rest, WALKED), is_single=is_single)


WALKED = {
    "weather": {
        **WEATHER,
        "properties": {key: value for key, value in PROPERTIES.items() if key != "place"},
        "required": ["days"],
    },
    "now": NOW,
}


def walk(matcher: llguidance.LLMatcher, draw: random.Random) -> str:
    """Return a text that the grammar allows. Each byte is any of the allowed bytes."""
    text = bytearray()
    while not (matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5)):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256])
        byte = int(draw.choice([each for each in allowed if each not in b" \t\r\n"] or list(allowed)))
        assert matcher.consume_token(byte), matcher.get_error()
        text.append(byte)
    return text.decode()


def check_calls(calls: list[tuple[str, Any]], *, is_single: bool) -> None:
    assert len(calls) == 1 if is_single else calls
    for called, arguments in calls:
        jsonschema.validate(arguments, WALKED[called])


NOTE = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/text"}, "note": {"$ref": "#/$defs/text"}},
    "required": ["name", "note"],
    "additionalProperties": False,
    "$defs": {"text": {"type": "string"}},
}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_is_calls_or_json_of_a_schema(name: str, is_single: bool) -> None:
    format_, draw = PARSERS[name], random.Random(name)
    grammar = format_.grammar(WALKED, written_with({}), is_single)
    thought, before = (THOUGHT, f"{THOUGHT}<|channel|>final<|message|>") if grammar.has_reasoning else ("", "")
    for start in grammar.markers:
        if grammar.has_reasoning and start.startswith("<|start|>"):
            continue  # the thought ends with these texts
        answer = matcher(grammar.or_json(NOTE))
        begin = f"{thought}{start}"
        assert answer.consume_tokens(BYTES.tokenize_bytes(begin.encode()))
        rest = walk(answer, draw)
        if not (name == "llama3_json" and '"note"' in rest):  # any object can follow its marker
            events = read_calls_or_json(format_, begin + rest)
            check_calls([event for event in events if isinstance(event, tuple)], is_single=is_single)
    # A name or a marker of a call in a string of the JSON is no call.
    marker = "" if grammar.has_reasoning else "".join(format_.starts[:1])
    note = json.dumps({"name": "weather", "note": f'{marker}[now()]{{"name":"now"}}'}, ensure_ascii=False)
    answer = matcher(grammar.or_json(NOTE))
    assert answer.consume_tokens(BYTES.tokenize_bytes((before + note).encode()))
    assert answer.is_accepting()
    assert read_calls_or_json(format_, before + note) == [note]
    for other in ("Hello", '{"name":5', '{"nom"', "{}", "[1]"):
        answer = matcher(grammar.or_json(NOTE))
        assert answer.validate_tokens(BYTES.tokenize_bytes((before + other).encode())) < len((before + other).encode())


def read_calls_or_json(format_: ToolFormat, text: str) -> list[str | tuple[str, Any]]:
    """Return the texts and calls of an answer that arrives in single characters."""
    parser = format_.calls_or_json(WALKED)
    items: list[Any] = []
    for event in (*(event for character in text for event in parser.feed(character)), *parser.finish()):
        if isinstance(event, CallBegin):
            items.append((event.name, ""))
        elif isinstance(event, CallArguments):
            items[-1] = (items[-1][0], items[-1][1] + event.text)
        elif isinstance(event, Text):
            if items and isinstance(items[-1], str):
                items[-1] += event.text
            else:
                items.append(event.text)
    return [item if isinstance(item, str) else (item[0], json.loads(item[1])) for item in items]


@pytest.mark.parametrize("name", PARSERS)
def test_special_tokens_are_written_by_their_numbers(name: str) -> None:
    format_ = PARSERS[name]
    special = {1000 + number: text for number, text in enumerate(format_.markers)}
    grammar = format_.grammar(TOOLS, written_with(special), False).or_json({"type": "object"})
    quoted = {text for text in special.values() if json.dumps(text, ensure_ascii=False) in grammar}
    assert not quoted
