"""Grammars that crash or stall a compiler without limits, or exhaust its memory. Each function returns a structured
output of SamplingParams."""

from __future__ import annotations

import json
from typing import Any

Structure = dict[str, Any]


def chained_rules(count: int) -> Structure:
    rules = [f"r{number}: r{number + 1}" for number in range(count)]
    return {"type": "grammar", "value": "\n".join(["start: r0", *rules, f'r{count}: "x"'])}


def chained_terminals(count: int) -> Structure:
    terminals = [f'R{number}: (R{number + 1} "a")*' for number in range(count)]
    return {"type": "grammar", "value": "\n".join(["start: R0", *terminals, f'R{count}: "x"'])}


def chained_references(count: int, *, arrays: int = 0) -> Structure:
    """arrays: levels of `items` around the `$ref` of each definition."""
    definitions: dict[str, Any] = {f"d{count}": {"type": "integer"}}
    for number in range(count):
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(arrays):
            schema = {"items": schema}
        definitions[f"d{number}"] = schema
    return {"type": "json_schema", "value": {"$ref": "#/$defs/d0", "$defs": definitions}}


def cyclic_references(count: int) -> Structure:
    definitions = {f"d{number}": {"$ref": f"#/$defs/d{(number + 1) % count}"} for number in range(count)}
    return {"type": "json_schema", "value": {"$ref": "#/$defs/d0", "$defs": definitions}}


def nested_arrays(depth: int) -> Structure:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "json_schema", "value": schema}


def multiples(count: int, *, of: int = 9973) -> Structure:
    """Return a schema that needs `of` states per property. Some hundreds of properties take seconds to minutes."""
    properties = {f"p{number}": {"type": "integer", "multipleOf": of - 2 * number} for number in range(count)}
    return {"type": "json_schema", "value": {"type": "object", "properties": properties}}


def ambiguous(count: int) -> Structure:
    """Return a grammar that compiles fast, but whose mask after the first token takes up to seconds to compute."""
    sequences = " | ".join(" ".join(["s"] * length) for length in range(2, count + 2))
    return {"type": "grammar", "value": f'start: ("x" s "\\n")+\ns: {sequences} | /(.|\\n)/'}


def lark(text: str) -> Structure:
    return {"type": "grammar", "value": text}


def schema_in_lark(structure: Structure) -> Structure:
    """Return the same JSON schema as a part of a Lark grammar."""
    return lark(f"start: %json {json.dumps(structure['value'])}")


def chained_properties(count: int) -> Structure:
    """Return a schema with chained references to properties instead of definitions."""
    properties: dict[str, Any] = {
        f"p{n}": {"$ref": f"#/properties/p%{ord(str(n + 1)[0]):x}{str(n + 1)[1:]}"} for n in range(count)
    }
    return {"type": "json_schema", "value": {"properties": {**properties, f"p{count}": {"type": "integer"}}}}


def chained_names(count: int, keyword: str) -> Structure:
    """Return a schema with chained references to named schemas. keyword: "$anchor" or "$id"."""
    mark = "#" if keyword == "$anchor" else ""
    definitions = {f"d{number}": {keyword: f"x{number}", "$ref": f"{mark}x{(number + 1)}"} for number in range(count)}
    definitions[f"d{count}"] = {keyword: f"x{count}", "type": "integer"}
    return {"type": "json_schema", "value": {"$ref": f"{mark}x0", "$defs": definitions}}


def nested_chains(count: int, levels: int) -> Structure:
    """Return `levels` nested grammars. Each is a chain of `count` rules, whose last rule is the next grammar."""
    text = 'start: "x"'
    for _ in range(levels):
        rules = [f"r{number}: r{number + 1}" for number in range(count)]
        text = "\n".join(["start: r0", *rules, f"r{count}: %lark {{", text, "}"])
    return lark(text)


REJECTED_BY_TEXT: dict[str, Structure] = {
    "2800 chained rules": chained_rules(2800),
    "150 chained rules": chained_rules(150),
    "150 chained terminals": chained_terminals(150),
    "1200 chained references": chained_references(1200, arrays=1),
    "100 chained references": chained_references(100),
    "cycle of 1200 references": cyclic_references(1200),
    "arrays nested 100 deep": nested_arrays(100),
    "constant nested 100 deep": {"type": "json_schema", "value": {"const": nested_arrays(100)["value"]}},
    "brackets nested 500 deep": {"type": "regex", "value": "(" * 500 + "x" + ")" * 500},
    "rule nested 500 deep": {"type": "grammar", "value": "start: " + "[" * 500 + '"x"' + "]" * 500},
    "many repetitions": {"type": "regex", "value": "(a{1,100000}){1,100000}"},
    "digits without end": {"type": "regex", "value": "a{" + "9" * 40 + "}"},
    "many choices": {"type": "choice", "value": [f"c{number}" for number in range(5000)]},
    "large multiple": {"type": "json_schema", "value": {"type": "integer", "multipleOf": 1_000_003}},
    "long text": {"type": "regex", "value": "a" * 100_000},
    "large multiple with a point": {"type": "json_schema", "value": {"type": "number", "multipleOf": 9999.9999}},
    "repetitions in the name of a property": {
        "type": "json_schema",
        "value": {"type": "object", "patternProperties": {"^a{1,20000}$": {"type": "integer"}}},
    },
    "200 chained properties": chained_properties(200),
    "200 chained anchors": chained_names(200, "$anchor"),
    "200 chained ids": chained_names(200, "$id"),
    "large multiple in Lark": lark('start: A %json {"type": "integer", "multipleOf": 1000003}\nA: "a"'),
    "pattern in Lark": lark('start: %json{"type": "string", "pattern": "a{1,20000}"}'),
    "100 chained references in Lark": schema_in_lark(chained_references(100)),
    "arrays nested 100 deep in Lark": schema_in_lark(nested_arrays(100)),
    "arrays nested 5000 deep in Lark": lark("start: %json " + "[" * 5000 + "]" * 5000),
    "large multiple in Lark in Lark": lark('start: %lark {\nstart: %json {"multipleOf": 1000003}\n}'),
    "chain over Lark in Lark": nested_chains(60, 2),
    "schema in JSON of several grammars": lark(' {"grammars": [{"json_schema": {"multipleOf": 1000003}}]}'),
    "repetitions between slashes": lark('start: A\nA: /"/ /x{1,20000}/ /"/'),
    "repetitions after a comment": lark('start: A // "\nA: /x{1,20000}/ // "'),
    "repetitions after a tilde": lark('start: "x"~20000'),
    "repetitions up to, after a tilde": lark('start: A\nA: "x" ~ 1..20000'),
    "repetitions in braces of Lark": lark('start: "x"{ 1, 20000 }'),
}
"""Grammars that exceed a limit of grammar_limits."""

REJECTED_BY_TRIAL: dict[str, tuple[Structure, str]] = {
    "40 references with 10 arrays each": (chained_references(40, arrays=10), "SIGSEGV"),
    "300 multiples": (multiples(300), "longer than"),
}
"""Grammars within those limits that terminate the compiling process, with a part of the error message."""
