"""Grammars of tool calls, in Lark's notation, by the format in which a model writes them.

Each function takes the JSON schemas of the arguments by the name of the tool, a function that writes a marker as Lark
has it, and whether the answer may have one call only. It returns the rules by the text that an answer begins with, and
the grammar that defines them. A rule describes what follows this text, up to the end of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.sampling.grammar_limits import JSON_OPTIONS

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
Written: TypeAlias = Callable[[str], str]
CallGrammar: TypeAlias = tuple[dict[str, str], str]

_SPACE = r"SPACE: /[ \t\r\n]{1,20}/"
_OF_JSON = ("integer", "number", "boolean", "array", "object")
"""Types of parameters that are written as JSON where values are text."""

_ANNOTATIONS = ("$comment", "description", "title")


def hermes(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other."""
    begin, end = written("<tool_call>"), written("</tool_call>")
    return {"<tool_call>": "calls"}, _lines(
        f"calls: {_repeated('call', f'SPACE? {begin} call', is_single)}",
        f"call: SPACE? %json {_dumped(any_call(tools))} SPACE? {end}",
        _SPACE,
    )


def qwen3_coder(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`: parameters as declared."""
    begin, end = written("<tool_call>"), written("</tool_call>")
    value_end, rules = '"</parameter>"', []
    for place, (name, schema) in enumerate(tools.items()):
        declared, required = schema.get("properties"), schema.get("required")
        properties = declared if isinstance(declared, Mapping) else {}
        parts = [f'"<function={_inner(name)}>" SPACE?']
        for number, (key, value) in enumerate(properties.items()):
            rule = f"value_{place}_{number}"
            is_needed = isinstance(required, list) and key in required
            parts.append(f'("<parameter={_inner(key)}>" {rule} SPACE?){"" if is_needed else "?"}')
            if isinstance(value, Mapping) and value.get("type") in _OF_JSON:
                own = _dumped(_with_definitions(value, root=schema))
                rules.append(f"{rule}: SPACE? %json {own} SPACE? {value_end}")
            else:
                rules.append(f"{rule}[suffix={value_end}]: /(?s:.*)/")
        rules.append(f'function_{place}: {" ".join(parts)} "</function>"')
    functions = " | ".join(f"function_{place}" for place in range(len(tools)))
    return {"<tool_call>": "calls"}, _lines(
        f"calls: {_repeated('call', f'SPACE? {begin} call', is_single)}",
        f"call: SPACE? ({functions}) SPACE? {end}",
        *rules,
        _SPACE,
    )


def llama3_json(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """`{"name": …, "parameters": {…}}`, with `;` between calls. An object that names no tool is no call."""
    starts = {"<|python_tag|>": "calls"}
    rules = []
    more = "" if is_single else ' (SPACE? ";" SPACE? call)*'
    for place, (name, schema) in enumerate(tools.items()):
        rule = f"rest_{place}"
        quoted = json.dumps(name)
        starts |= {f'{{"name": {quoted}': rule, f'{{"name":{quoted}': rule}
        rules.append(
            f'{rule}: SPACE? "," SPACE? ("\\"parameters\\"" | "\\"arguments\\"") SPACE? ":" SPACE? '
            f'%json {_dumped(schema)} SPACE? "}}"{more}'
        )
    call = f"call: %json {_dumped(any_call(tools, arguments='parameters'))}"
    return starts, _lines(f"calls: SPACE? call{more}", call, *rules, _SPACE)


def mistral(tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`."""
    begin, arguments, number = map(written, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
    named = " | ".join(f"named_{place}" for place in range(len(tools)))
    head = f"SPACE? ({number} SPACE? /[0-9A-Za-z]{{1,32}}/)? ({arguments} SPACE?)?"
    return {"[TOOL_CALLS]": "calls"}, _lines(
        f"calls: SPACE? (list | {_repeated(f'({named})', f'SPACE? {begin} SPACE? ({named})', is_single)})",
        f"list: %json {_dumped(list_of_calls(tools, is_single=is_single))}",
        *(
            f'named_{place}: "{_inner(name)}" {head} %json {_dumped(schema)}'
            for place, (name, schema) in enumerate(tools.items())
        ),
        _SPACE,
    )


def without_annotations(schema: Any) -> Any:
    """Return a copy of a schema without its texts for readers, which may take most of the limit of a grammar."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum") else without_annotations(value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS or not isinstance(value, str)  # a property of this name has a schema
    }


def any_call(tools: Schemas, *, arguments: str = "arguments", at: str = "#/anyOf") -> dict[str, Any]:
    """Return the schema of a call of any of the tools.

    arguments: the key of the arguments. at: the place of the list of calls in the schema around it.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                arguments: _referring(schema, to=f"{at}/{place}/properties/{arguments}"),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for place, (name, schema) in enumerate(tools.items())
    ]
    return {"anyOf": calls}


def list_of_calls(tools: Schemas, *, is_single: bool) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    limit = {"maxItems": 1} if is_single else {}
    return {"type": "array", "minItems": 1, **limit, "items": any_call(tools, at="#/items/anyOf")}


def _referring(schema: Any, *, to: str) -> Any:
    """Return a copy of a schema for the place `to` of another one, with the references into itself adapted."""
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
    """Return the schema of a property as a schema of its own, with the definitions of the one around it."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **value}


def _repeated(first: str, further: str, is_single: bool) -> str:
    return first if is_single else f"{first} ({further})*"


def _inner(text: str) -> str:
    """Return a text as it is within quotes of Lark."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _dumped(schema: Mapping[str, Any]) -> str:
    """Return a schema as %json has it."""
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False, separators=(",", ":"))


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
