"""Limits of grammars, checked on their text: errors name the exceeded limit, and usual grammars pass."""

import contextlib
import json
import math
import time
from typing import Any

import pytest
from hostile_grammars import (
    REJECTED_BY_TEXT,
    REJECTED_BY_TRIAL,
    chained_names,
    chained_properties,
    chained_references,
    chained_rules,
    cyclic_references,
    nested_arrays,
    nested_chains,
    schema_in_lark,
)

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling import grammar_limits
from megatron_runtime.sampling.grammar_limits import check_structure

SQL = r"""
start: select ";"
select: "SELECT"i columns "FROM"i NAME where? limit?
columns: "*" | expression ("," expression)*
where: "WHERE"i expression
limit: "LIMIT"i NUMBER
expression: expression OPERATOR expression | "(" expression ")" | NAME | NUMBER | NAME "(" [expression] ")"
OPERATOR: "=" | "<" | ">" | /AND/i | /\(\(\(/
NAME: /[A-Za-z_][A-Za-z0-9_]{0,30}/
NUMBER: /[0-9]{1,9}/
%ignore /[ \t\n]+/
"""
LARK = r"""
%llguidance {"no_forcing": true}
%import common.NUMBER
%ignore /[ \t]+/ // "blanks"
start: "{" part~1..9 "}" (<|endoftext|> | <[5-9]>)? # "end"
?part: long | A{2,} | %json {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": true}} -> name
    | %lark {
start: %regex {"substring_chars": "}"} | A
A: /[}"\/]{1,9}/i
}
long[capture, max_tokens=100000]: /[a-z]+/
A: "\"}é"i | "a".."z" | NUMBER
"""
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
}


@pytest.mark.parametrize("name", REJECTED_BY_TEXT)
def test_structure_beyond_a_limit_is_rejected_with_limit_and_remedy(name: str) -> None:
    with pytest.raises(
        InvalidSamplingParamsError,
        match=r"structured_output=.*(at most [0-9]+|multipleOf of at most|give a JSON schema|JSON value)",
    ):
        check_structure(REJECTED_BY_TEXT[name])


@pytest.mark.parametrize(
    "structure",
    [
        {"type": "grammar", "value": SQL},
        {"type": "json_schema", "value": TREE},
        {"type": "json_object", "value": nested_arrays(500)},
        {"type": "choice", "value": ["((((", "a|b", "\ud800"]},
        {"type": "regex", "value": r"\((a|b){1,3}\)\{[^{]"},
        {"type": "grammar", "value": ""},
        chained_rules(90),
        chained_references(40),
        cyclic_references(40),
        nested_arrays(40),
        chained_properties(40),
        chained_names(40, "$anchor"),
        chained_names(40, "$id"),
        nested_chains(45, 2),
        schema_in_lark({"value": TREE}),
        {"type": "json_schema", "value": {"type": "number", "multipleOf": 0.00001}},
        {"type": "grammar", "value": LARK},
        *(structure for structure, _ in REJECTED_BY_TRIAL.values()),
    ],
)
def test_structure_within_the_limits_is_accepted(structure: dict[str, Any]) -> None:
    check_structure(structure)


@pytest.mark.parametrize(
    "value", [b"bytes", 10**5000, {1, 2}, {"maximum": math.inf}], ids=["bytes", "digits", "set", "infinity"]
)
def test_values_that_json_cannot_express_are_rejected(value: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match="that JSON can express"):
        check_structure({"type": "json_schema", "value": {"const": value}})


@pytest.mark.parametrize(
    "structure",
    [
        {"type": "json_schema", "value": {"enum": [1] * 1_000_000}},
        {"type": "json_schema", "value": {str(number): 1 for number in range(100_000)}},
        {"type": "choice", "value": ["x" * 50_000, "y" * 50_000]},
        {"type": "grammar", "value": "x" * 1_000_000},
    ],
    ids=["values", "names", "choices", "text"],
)
def test_large_structures_are_rejected_without_json_encoding(
    structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_limits, "json", None)
    with pytest.raises(InvalidSamplingParamsError, match="at most"):
        check_structure(structure)


LONG = grammar_limits.MAX_GRAMMAR_BYTES - 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "{ " + " " * LONG),
        ("regex", "{" + "1" * LONG),
        ("regex", "{1,1" * (LONG // 4)),
        ("grammar", '"' + '\\"' * (LONG // 2)),
        ("grammar", "!" * LONG),
        ("grammar", "a" * LONG),
        ("grammar", ("a" * 99 + " " * 99 + "\n") * (LONG // 199)),
        ("grammar", "\n".join(f"r{n}: " + " ".join(f"r{m}" for m in range(99)) for n in range(99))),
        ("grammar", "\n".join(f"r{n}: r{n}" for n in range(999))),
        ("grammar", "start: " + "/" * LONG),
        ("grammar", "start: %json " + '{"a":' * (LONG // 5)),
        ("grammar", "start: " + "%json 1 " * (LONG // 8)),
        ("grammar", "start: " + "%lark {" * (LONG // 7)),
        ("json_schema", '{"a": [%s {"$ref": "#/a"}]}' % ('{"$ref": "#/a/0"},' * (LONG // 20))),
        ("json_schema", json.dumps({"a": [{"$ref": f"#/a/{n}"} for n in range(LONG // 22)]})),
    ],
)
def test_hostile_text_is_checked_in_linear_time(kind: str, text: str) -> None:
    """Some milliseconds of CPU time. A pattern that backtracks over the whole text would take minutes."""
    value = json.loads(text) if kind == "json_schema" else text
    started = time.thread_time()
    with contextlib.suppress(InvalidSamplingParamsError):
        check_structure({"type": kind, "value": value})
    assert time.thread_time() - started < 5
