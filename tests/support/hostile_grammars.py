"""Grammars that crash or stall a compiler without limits, or exhaust its memory. Each function returns a structured
output of SamplingParams."""

from __future__ import annotations

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
    """Needs `of` states per property: seconds to minutes for some hundreds of properties."""
    properties = {f"p{number}": {"type": "integer", "multipleOf": of - 2 * number} for number in range(count)}
    return {"type": "json_schema", "value": {"type": "object", "properties": properties}}


def ambiguous(count: int) -> Structure:
    """Compiles fast; the mask after the first token takes up to seconds."""
    sequences = " | ".join(" ".join(["s"] * length) for length in range(2, count + 2))
    return {"type": "grammar", "value": f'start: ("x" s "\\n")+\ns: {sequences} | /(.|\\n)/'}


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
}
"""Grammars that exceed a limit of grammar_limits."""

REJECTED_BY_TRIAL: dict[str, tuple[Structure, str]] = {
    "40 references with 10 arrays each": (chained_references(40, arrays=10), "SIGSEGV"),
    "300 multiples": (multiples(300), "longer than"),
}
"""Grammars within those limits that terminate the compiling process, with a part of the error message."""
