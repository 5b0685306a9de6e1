"""Grammars of tool calls in Lark's notation.

This module has the complete grammars of some formats, and the functions with which other formats build their grammars.
A grammar is built from three inputs:
- the JSON schemas of the arguments, by tool name
- a function that converts a literal text to Lark's notation
- whether the answer can have only one tool call

The result maps the beginning of an answer to a rule for the rest of the answer. It also describes a whole answer that
is either tool calls or JSON, for requests with tools and a JSON format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import MAX_MARKERS
from megatron_runtime.sampling.grammar_limits import JSON_OPTIONS, MAX_GRAMMAR_BYTES
from megatron_runtime.server.formats.head import Head

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
Written: TypeAlias = Callable[[str], str]

Role: TypeAlias = Literal["name", "arguments", "id"]
Keys: TypeAlias = tuple[tuple[str, Role], ...]
"""The keys of a JSON tool call in order, each with its role. Only the key of the id is optional."""
KEYS: Keys = (("name", "name"), ("arguments", "arguments"))
_KEYS_OF_LLAMA: Keys = (("name", "name"), ("parameters", "arguments"))
_ID = {"type": "string", "pattern": "^[0-9A-Za-z_-]{1,64}$"}

SPACE = r"SPACE: /[ \t\r\n]{1,20}/"
_OF_JSON = ("integer", "number", "boolean", "array", "object")
"""JSON types whose values are written as JSON even in formats that write other values as plain text."""

_PYTHON_STRING = r"""'([^'\\\n]|\\[\\'"nrt])*'"""
_ANNOTATIONS = ("$comment", "description", "title")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of answers with tool calls.

    markers: texts with which an answer can begin its first call, each with the rule for the rest of the answer.
    rules:   the rules in Lark's notation.
    answer:  Lark expression of a whole answer that is either tool calls or the rule `json`, which `rules` lacks.
    has_reasoning: whether `answer` includes the reasoning. If not, `answer` describes the text after the reasoning.
    """

    markers: Mapping[str, str]
    rules: str
    answer: str
    has_reasoning: bool = False

    @classmethod
    def of(cls, markers: Mapping[str, str], written: Written, *rules: str) -> CallGrammar:
        """Return the grammar of a format whose calls all begin with a marker."""
        calls = [f"{written(marker)} {rule}" for marker, rule in markers.items()]
        return cls(markers, lines(*rules, SPACE), f"SPACE? ({' | '.join([*calls, 'json'])})")

    @property
    def structure(self) -> dict[str, Any] | None:
        """The sampling parameter `call_structure`; None if the grammar exceeds the limits of the parameter."""
        if len(self.rules) > MAX_GRAMMAR_BYTES or len(self.markers) > MAX_MARKERS:
            return None
        return {"markers": dict(self.markers), "grammar": self.rules}

    def or_json(self, schema: Mapping[str, Any]) -> str:
        """Return the grammar of an answer that is either tool calls or JSON. schema: JSON schema of this JSON."""
        return lines(f"start: {self.answer}", f"json: %json {dumped(without_annotations(schema))}", self.rules)


def all_calls(
    openings: Sequence[str], group: str, rules: Sequence[str], written: Written, *, is_single: bool
) -> CallGrammar:
    """Return the grammar of an answer with one or more groups of tool calls.

    openings: each group begins with one of these texts.
    group:    Lark expression of the rest of a group.
    rules:    the rules that `group` refers to.
    """
    opening = " | ".join(map(written, openings))
    more = "" if is_single else f" (SPACE? ({opening}) group)*"
    markers = dict.fromkeys(openings, "calls")
    return CallGrammar.of(markers, written, f"calls: group{more}", f"group: {group}", *rules)


def llama3_json(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of tool calls `{"name": …, "parameters": {…}}`, separated by `;`. Other objects are text."""
    tag = "<|python_tag|>"
    starts = {tag: "calls"}
    rules = []
    more = "" if is_single else ' (SPACE? ";" SPACE? call)*'
    for place, (name, schema) in enumerate(tools.items()):
        rule = f"rest_{place}"
        starts |= {f'{{"name":{space}{json.dumps(name)}': rule for space in ("", " ")}
        rules.append(
            f'{rule}: SPACE? "," SPACE? ("\\"parameters\\"" | "\\"arguments\\"") SPACE? ":" SPACE? '
            f'%json {dumped(schema)} SPACE? "}}"{more}'
        )
    call = f"call: %json {dumped(any_call(tools, keys=_KEYS_OF_LLAMA))}"
    # With the markers of calls, which are prefixes of JSON and single lexemes, the lexer would reject other JSON.
    answer = f"SPACE? (({written(tag)})? calls | json)"
    return CallGrammar(starts, lines(f"calls: SPACE? call{more}", call, *rules, SPACE), answer)


def functionary_v32(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of a tool call as `name`, a newline and the arguments, with `>>>` before each further call."""
    starts = {f"{name}\n": f"calls_{place}" for place, name in enumerate(tools)}
    call = " | ".join(f"{quoted(start)} rest_{place}" for place, start in enumerate(starts))
    more = "" if is_single else f" (SPACE? {written('>>>')} ({call}))*"
    rest = [f"rest_{place}: %json {dumped(schema)}" for place, schema in enumerate(tools.values())]
    calls = [f"calls_{place}: rest_{place}{more}" for place in range(len(tools))]
    return CallGrammar.of(starts, written, *calls, *rest)


def pythonic(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of tool calls `[name(argument="value"), …]`, with arguments in the order of declaration."""
    starts = {f"[{name}(": f"calls_{place}" for place, name in enumerate(tools)}
    further, rules = _python_calls(tools, is_single=is_single)
    first = [f'calls_{place}: arguments_{place} ")"{further} "]"' for place in range(len(tools))]
    return CallGrammar.of(starts, written, *first, *rules)


def lfm2(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of `<|tool_call_start|>[name(argument="value"), …]<|tool_call_end|>`."""
    begin, end = "<|tool_call_start|>", written("<|tool_call_end|>")
    further, rules = _python_calls(tools, is_single=is_single)
    return CallGrammar.of({begin: "calls"}, written, f'calls: SPACE? "[" call{further} "]" {end}', *rules)


def _python_calls(tools: Schemas, *, is_single: bool) -> tuple[str, list[str]]:
    """Return the Lark expression for all calls after the first call, and the rules for all calls.

    The expression is empty if only one call is allowed.
    """
    calls = " | ".join(f'{quoted(f"{name}(")} arguments_{place} ")"' for place, name in enumerate(tools))
    rules = [f"call: {calls}"]
    for place, schema in enumerate(tools.values()):
        entries = list(parameters_of(schema))
        values = [f"{quoted(f'{entry.name}=')} value_{place}_{number}" for number, entry in enumerate(entries)]
        required = [entry.is_required for entry in entries]
        rules += _separated(f"arguments_{place}", list(zip(values, required, strict=True)), '"," SPACE?')
        rules += [f"value_{place}_{number}: {_python_value(entry)}" for number, entry in enumerate(entries)]
    return "" if is_single else ' ("," SPACE? call)*', rules


def gemma4(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of `<|tool_call>call:name{key:<|"|>text<|"|>,…}<tool_call|>`.

    The notation has no escape sequences in keys and texts.
    """
    rules = _Gemma4Rules(written)
    calls = [
        f"{quoted(f'call:{name}')} {rules.value(f'arguments_{place}', {**schema, 'type': 'object'})}"
        for place, (name, schema) in enumerate(tools.items())
    ]
    group = f"({' | '.join(calls)}) {written('<tool_call|>')}"
    return all_calls(("<|tool_call>",), group, rules.rules, written, is_single=is_single)


def minimax_m3(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of `<invoke name="…"><key>value</key>…</invoke>`.

    A marker precedes each tag, and elements can be nested.
    """
    tag = "]<]minimax[>["
    rules = _MiniMaxM3Rules(tag, written)
    calls = [
        f"{written(f'{tag}<invoke name={quoted(name)}>')} "
        f"{rules.value(f'arguments_{place}', {**schema, 'type': 'object'}, f'{tag}</invoke>')}"
        for place, (name, schema) in enumerate(tools.items())
    ]
    call = f"SPACE? ({' | '.join(calls)})"
    group = f"call{'' if is_single else '+'} (SPACE? {written(f'{tag}</tool_call>')})?"
    openings = (f"{tag}<tool_call>",)
    return all_calls(openings, group, [f"call: {call}", *rules.rules], written, is_single=is_single)


def gpt_oss(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """Return the grammar of an answer that ends with a tool call.

    The call is `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`.
    """
    channel, begin = "<|channel|>commentary", "<|start|>assistant"
    recipient = f"{channel} to=functions."
    starts = dict.fromkeys((recipient, f"{begin}{recipient}"), "calls")
    starts |= dict.fromkeys(("to=functions.", f"{begin} to=functions."), "calls_of_recipient")
    kind = f'(SPACE "json" | SPACE? {written("<|constrain|>")} "json")?'
    head = f"{kind} SPACE? {written('<|message|>')}"
    end = f"{written('<|call|>')}?"
    rules = [f"arguments_{place}: {head} %json {dumped(schema)} {end}" for place, schema in enumerate(tools.values())]
    names = [(quoted(name), f"arguments_{place}") for place, name in enumerate(tools)]
    before, after = (
        " | ".join(f"{name} {middle}{arguments}" for name, arguments in names)
        for middle in ("", f"{written(channel)} ")
    )
    attributes, thought = until("<|end|>", written)
    rules += [
        f"calls: {before}",
        f"calls_of_recipient: {after}",
        f"thought: {written('<|channel|>analysis<|message|>')} thought_end {written(begin)}",
        f"thought_end{attributes}: {thought}",
    ]
    answers = (
        f"{written(recipient)} calls",
        f"SPACE? {written('to=functions.')} calls_of_recipient",
        f"{written('<|channel|>final<|message|>')} json",
    )
    return CallGrammar(starts, lines(*rules, SPACE), f"thought* ({' | '.join(answers)})", has_reasoning=True)


class _Gemma4Rules:
    """Generates grammar rules for values in Gemma 4's notation.

    The members of a JSON object are sorted by name, as in Gemma 4's chat template.
    """

    QUOTE = '<|"|>'

    def __init__(self, written: Written) -> None:
        quote = written(self.QUOTE)
        attributes, text = until(self.QUOTE, written)
        self._quote = quote
        self.rules = [
            f"text: {quote} text_end",
            f"text_end{attributes}: {text}",
            r"KEY: /[^:{}\[\],<>\s]{1,128}/",
            'any: text | any_object | any_list | %json {"type":["number","boolean","null"]}',
            'any_object: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
            'any_list: "[" (any ("," any)*)? "]"',
        ]

    def value(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Return the Lark expression of a value with a JSON schema.

        rule: prefix for the names of the rules that the expression uses.
        """
        entry = ToolParameter("", schema, is_required=True)
        match entry.kind:
            case "string" if entry.choices:
                return f"{self._quote} ({' | '.join(map(quoted, entry.choices))}) {self._quote}"
            case "string":
                return "text"
            case "integer" | "number" | "boolean":
                return f"%json {dumped(schema)}"
            case "array":
                items = schema.get("items")
                if isinstance(items, Mapping):
                    self.rules.append(f"{rule}_item: {self.value(f'{rule}_item', items)}")
                    return f'"[" ({rule}_item ("," {rule}_item)*)? "]"'
                return "any_list"
            case "object" if (members := list(parameters_of(schema))) or schema.get("additionalProperties") is False:
                entries = []
                for number, member in enumerate(sorted(members, key=lambda member: member.name.lower())):
                    name = f"{rule}_{number}"
                    self.rules.append(f"{name}: {self.value(name, member.schema)}")
                    entries.append((f"{quoted(f'{member.name}:')} {name}", member.is_required))
                self.rules += _separated(rule, entries, '","')
                return f'"{{" {rule} "}}"'
            case "object":
                return "any_object"
        return "any"


class _MiniMaxM3Rules:
    """Generates grammar rules for values in MiniMax M3's notation."""

    def __init__(self, tag: str, written: Written) -> None:
        self._tag, self._written = tag, written
        self.rules: list[str] = []

    def value(self, rule: str, schema: Mapping[str, Any], end: str) -> str:
        """Return the Lark expression of a value with a JSON schema, followed by its closing tag `end`.

        rule: prefix for the names of rules that the expression refers to.
        """
        entry, ending = ToolParameter("", schema, is_required=True), self._written(end)
        items = schema.get("items")
        match entry.kind:
            case "object" if (members := list(parameters_of(schema))) or schema.get("additionalProperties") is False:
                parts = []
                for number, member in enumerate(members):
                    element = self._element(f"{rule}_{number}", member.name, member.schema)
                    parts.append(f"({element}){'' if member.is_required else '?'}")
                return " ".join([*parts, ending])
            case "array" if isinstance(items, Mapping):
                return f"({self._element(f'{rule}_item', 'item', items)})* {ending}"
            case "integer" | "number" | "boolean":
                return f"%json {dumped(schema)} {ending}"
            case "string" if entry.choices:
                return f"({' | '.join(map(quoted, entry.choices))}) {ending}"
        attributes, text = until(end, self._written)
        self.rules.append(f"{rule}_text{attributes}: {text}")
        return f"{rule}_text"

    def _element(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        begin, end = f"{self._tag}<{name}>", f"{self._tag}</{name}>"
        self.rules.append(f"{rule}: {self._written(begin)} {self.value(rule, schema, end)}")
        return rule


def _separated(rule: str, entries: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Return grammar rules for a list of entries in a fixed order, separated by `separator`.

    rule:    name of the rule for the list.
    entries: the expression of each entry, and whether the entry is required.
    """
    rules = []
    first = rule
    for number, (entry, is_required) in enumerate(entries):
        after_none, after_one = f"{rule}_first_{number + 1}", f"{rule}_more_{number + 1}"
        rules.append(f"{first}: {entry} {after_one}{'' if is_required else f' | {after_none}'}")
        if number:
            more = f"{separator} {entry} {after_one}{'' if is_required else f' | {after_one}'}"
            rules.append(f"{rule}_more_{number}: {more}")
        first = after_none
    return [*rules, f'{first}: ""', *([f'{rule}_more_{len(entries)}: ""'] if entries else [])]


def _python_value(entry: ToolParameter) -> str:
    if entry.kind == "boolean":
        return '"True" | "False"'
    values = [f"%json {dumped(entry.schema)}"]
    values += (
        [f"/{_PYTHON_STRING}/"]
        if entry.is_any_string
        else [quoted(f"'{choice}'") for choice in entry.choices if not {"'", "\\"} & set(choice)]
    )
    return " | ".join(values)


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """A parameter of a tool. schema: JSON schema of the value, including all definitions that it refers to."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool

    @property
    def kind(self) -> str:
        kind = self.schema.get("type")
        return kind if isinstance(kind, str) else ""

    @property
    def choices(self) -> Sequence[str]:
        """The values of the schema's `enum` if all are strings. Empty if the schema has no such `enum`."""
        choices = self.schema.get("enum")
        is_of_texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
        return choices if isinstance(choices, list) and is_of_texts else ()

    @property
    def is_any_string(self) -> bool:
        return self.kind == "string" and self.schema.keys() <= {"type", "default", *_ANNOTATIONS, *_DEFINITIONS}

    @property
    def is_json(self) -> bool:
        """Whether the parameter's value is JSON even in tool-call formats that write strings as plain text."""
        return self.kind in _OF_JSON


def parameters_of(schema: Mapping[str, Any]) -> Iterator[ToolParameter]:
    """Yield the declared parameters of a tool. schema: JSON schema of the tool's arguments."""
    declared, required = schema.get("properties"), schema.get("required")
    for name, value in declared.items() if isinstance(declared, Mapping) else ():
        own = _with_definitions(value, root=schema) if isinstance(value, Mapping) else {}
        yield ToolParameter(name, own, isinstance(required, list) and name in required)


def without_annotations(schema: Any) -> Any:
    """Return a copy of a schema without titles and descriptions, so that a grammar stays below its size limit."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum") else without_annotations(value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS or not isinstance(value, str)  # this schema belongs to a property named "title"
    }


def any_call(tools: Schemas, *, keys: Keys = KEYS, at: str = "#/anyOf") -> dict[str, Any]:
    """Return the JSON schema of one call of any of the tools.

    at: JSON pointer to the result's `anyOf` in the complete schema.
    """
    calls = []
    for place, (name, schema) in enumerate(tools.items()):
        of_role: dict[Role, Any] = {"name": {"const": name}, "id": _ID}
        properties = {
            key: _referring(schema, to=f"{at}/{place}/properties/{key}") if role == "arguments" else of_role[role]
            for key, role in keys
        }
        required = [key for key, role in keys if role != "id"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"anyOf": calls}


def keyed_calls(tools: Schemas, *, is_single: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of tool calls, each of which is an object `{name of the tool: arguments}`."""
    entries = [
        {
            "type": "object",
            "properties": {name: _referring(schema, to=f"#/items/anyOf/{place}/properties/{name}")},
            "required": [name],
            "additionalProperties": False,
        }
        for place, (name, schema) in enumerate(tools.items())
    ]
    return {"type": "array", "minItems": 1, **_at_most_one(is_single), "items": {"anyOf": entries}}


def list_of_calls(tools: Schemas, *, is_single: bool, keys: Keys = KEYS) -> dict[str, Any]:
    """Return the JSON schema of a list of tool calls. keys: keys of the name and the arguments in each call."""
    return {
        "type": "array",
        "minItems": 1,
        **_at_most_one(is_single),
        "items": any_call(tools, keys=keys, at="#/items/anyOf"),
    }


def _at_most_one(is_single: bool) -> dict[str, int]:
    return {"maxItems": 1} if is_single else {}


def _referring(schema: Any, *, to: str) -> Any:
    """Return a copy of a schema for insertion into another schema. Each reference of the copy begins with `to`."""
    if isinstance(schema, list):
        return [_referring(item, to=to) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _referring(value, to=to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _with_definitions(value: Mapping[str, Any], *, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a property with a copy of the definitions in the enclosing schema `root`."""
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **value}


def quoted(text: str) -> str:
    """Return a text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def until(end: str, written: Written) -> tuple[str, str]:
    """Return the attributes and the Lark expression of a rule that matches any text up to and including `end`."""
    if written(end) == quoted(end):
        return f"[suffix={quoted(end)}]", "/(?s:.*)/"
    return "", f"/(?s:.*)/ {written(end)}"  # no regular expression matches `end`, because it is a special token


def written_with(special_tokens: Mapping[int, str]) -> Written:
    """Return a function that converts a literal text to Lark's notation.

    special_tokens: texts of the format's special tokens, by token id.
    """
    by_text = {text: id_ for id_, text in special_tokens.items()}
    longest_first = sorted(by_text, key=len, reverse=True)
    pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)")

    def written(text: str) -> str:
        texts = filter(None, pieces.split(text))
        return " ".join(f"<[{by_text[piece]}]>" if piece in by_text else quoted(piece) for piece in texts)

    return written


def written_head(head: Head, written: Written, **holes: str) -> str:
    """Return the Lark expression for `head`, the text at the beginning of a tool call or an argument.

    holes: Lark expressions for the holes in this text, by name of the hole.
    """
    expressions = {"text": written, "space": lambda _: "SPACE?", "hole": lambda name: holes[name]}
    return " ".join(expressions[kind](text) for kind, text in head.parts)


def dumped(schema: Mapping[str, Any]) -> str:
    """Return a schema as the text that Lark's %json expects."""
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False, separators=(",", ":"))


def lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
