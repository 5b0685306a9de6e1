"""Schemas, regular expressions and grammars as other servers' clients write them, compiled and matched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_dialects import normalised, unsupported, with_ascii_classes
from megatron_runtime.sampling.structured_output import GrammarCompiler
from megatron_runtime.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m", renders_chat=False)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)
    yield compiler
    compiler.close()


def is_answer(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str, value: Any, text: str) -> bool:
    """Return whether a text is a complete answer."""
    state = compiler.begin({"type": kind, "value": value}, tokenizer.encode(text, add_special=False))
    if state.failure is not None:
        return False
    mask, (eos, *_) = state.allowed(), tokenizer.eos_ids
    return state.is_complete or (mask is not None and bool(mask[eos // 32] >> (eos % 32) & 1))


STRING = {"type": "string"}
LIST = {"type": "array", "items": STRING}
DROPPED: list[tuple[list[str], dict[str, Any], Any]] = [
    (["not"], {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 0}}}}, {"a": 0}),
    (["propertyNames"], {"propertyNames": {"pattern": "^[a-z]+$"}, "type": "object"}, {"A": 1}),
    (["if", "then"], {"type": "object", "properties": {"a": STRING}, "if": {}, "then": {"required": ["b"]}}, {"a": ""}),
    (["uniqueItems"], {**LIST, "uniqueItems": True}, ["a", "a"]),
    (["contains", "maxContains"], {**LIST, "contains": {"const": "x"}, "maxContains": 1}, ["a"]),
    (["dependentRequired"], {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    (["format"], {**STRING, "format": "byte"}, "?"),
    (["pattern"], {**STRING, "pattern": r"^(?!.*\.\.)[a-z.]+$"}, ".."),
    (["pattern"], {**STRING, "pattern": r"\bword\b"}, "x"),
    (["patternProperties"], {"type": "object", "patternProperties": {"(?=a)": STRING}}, {"a": "x"}),
    (["oneOf"], {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
    (["minProperties"], {"type": "object", "properties": {"a": {}}, "minProperties": 1}, {}),
    (
        ["not"],
        {"$defs": {"x": {"type": "array", "items": {"anyOf": [{"not": {}, **STRING}]}}}, "$ref": "#/$defs/x"},
        ["a"],
    ),
]


@pytest.mark.parametrize(("dropped", "schema", "value"), DROPPED)
def test_keywords_that_only_narrow_are_dropped_and_named(
    compiler: GrammarCompiler, tokenizer: Tokenizer, dropped: list[str], schema: dict[str, Any], value: Any
) -> None:
    with pytest.raises(InvalidSamplingParamsError):
        compiler.begin({"type": "json_schema", "value": schema})
    known, found = normalised(schema, closes=False)
    assert found == dropped
    assert is_answer(compiler, tokenizer, "json_schema", known, json.dumps(value))


def test_null_is_an_absent_keyword_but_a_value_of_const() -> None:
    schema = {"type": None, "properties": {"a": {"const": None, "enum": None}}, "default": None, "items": None}
    kept = {"properties": {"a": {"const": None}}, "default": None}
    assert normalised(schema, closes=False, is_strict=True) == (kept, [])


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": STRING, "pattern": {"enum": [{"if": 1, "properties": {"a": 1}}]}, "format": STRING},
        "default": {"not": 1},
        "required": ["not"],
        "minLength": 1,
    }
    assert normalised(schema, closes=False) == (schema, [])


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}
CLOSED: list[tuple[dict[str, Any], Any, Any]] = [
    (OBJECT, {"a": 1}, {"a": 1, "z": 1}),
    ({"type": "array", "items": OBJECT}, [{"a": 1}], [{"z": 1}]),
    ({"anyOf": [OBJECT, OTHER]}, {"b": 1}, {"z": 1}),
    ({"$defs": {"o": OBJECT}, "$ref": "#/$defs/o"}, {"a": 1}, {"z": 1}),
    ({"type": "object", "properties": {"in": OBJECT}}, {"in": {"a": 1}}, {"in": {"z": 1}}),
    ({**OBJECT, "patternProperties": {"^x_": {}}}, {"x_1": 1}, {"z": 1}),
    ({**OBJECT, "anyOf": [{"required": ["a"]}, {"required": []}]}, {"a": 1}, {"a": 1, "z": 1}),
    ({"properties": {"in": {"properties": {"a": {}}}}}, {"in": {"a": 1}}, {"in": 1}),
    ({**OBJECT, "additionalProperties": None, "required": None, "minProperties": None}, {"a": 1}, {"z": 1}),
]
OPEN: list[tuple[dict[str, Any], Any]] = [
    ({"type": "object"}, {"z": 1}),
    ({"type": "object", "properties": {}}, {"z": 1}),
    ({**OBJECT, "additionalProperties": True}, {"z": 1}),
    ({"type": "object", "properties": {"in": {"type": "object"}}}, {"in": {"z": 1}}),
    ({"allOf": [OBJECT, OTHER]}, {"a": 1, "b": 2}),
    ({"$defs": {"o": OBJECT}, "allOf": [{"$ref": "#/$defs/o"}, OTHER]}, {"a": 1, "b": 2}),
    ({"$defs": {"o": OBJECT, "p": {"$ref": "#/$defs/o"}}, "allOf": [{"$ref": "#/$defs/p"}, OTHER]}, {"a": 1, "b": 2}),
    ({**OBJECT, "anyOf": [OTHER]}, {"a": 1, "b": 2}),
    ({**OBJECT, "required": ["z"]}, {"z": 1}),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED)
def test_objects_that_declare_properties_are_closed(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], good: Any, bad: Any
) -> None:
    known, dropped = normalised(schema, closes=True)
    assert dropped == []
    assert is_answer(compiler, tokenizer, "json_schema", known, json.dumps(good))
    assert not is_answer(compiler, tokenizer, "json_schema", known, json.dumps(bad))
    assert is_answer(compiler, tokenizer, "json_schema", normalised(schema, closes=False)[0], json.dumps(good))


@pytest.mark.parametrize(("schema", "value"), OPEN)
def test_objects_whose_other_properties_are_declared_elsewhere_stay_open(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], value: Any
) -> None:
    known, _ = normalised(schema, closes=True)
    assert is_answer(compiler, tokenizer, "json_schema", known, json.dumps(value))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d{2}", "42", "٤٢"),
        (r"[\d]{2}:[^\d]", "42:x", "42:1"),
        (r"\w+", "a_1", "ä"),
        (r"\W", "ä", "a"),
        (r"[\W\d]+", "ä1", "a"),
        (r"a\sb", "a b", "a\u00a0b"),
        (r"\S", "\u00a0", " "),
        (r"[]\d]+", "]1", "a"),
        (r"\\d", r"\d", "1"),
        (r"[[:alpha:]]\d", "a1", "11"),
        (r"(?i)ab\d", "AB1", "ab٤"),
    ],
)
def test_classes_of_characters_are_ascii(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str, good: str, bad: str
) -> None:
    expression = with_ascii_classes(pattern)
    assert is_answer(compiler, tokenizer, "regex", expression, good)
    assert not is_answer(compiler, tokenizer, "regex", expression, bad)


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        ("(?!no)a", "(?!"),
        ("a(?<=a)", "(?<="),
        (r"(a)\1", r"\1"),
        (r"(?<n>a)\k<n>", r"\k"),
        (r"\bword", r"\b"),
        ("(?>a)", "(?>"),
        (r"[(?!]\(?=x(?<n>a)(?:b)\u00e4\p{L}", None),
    ],
)
def test_what_no_grammar_can_express_is_named(pattern: str, construct: str | None) -> None:
    assert unsupported(pattern) == construct


GBNF = """# a list
root   ::= item ("," ws item)*
item ::= "-"? [0-9]+ | "é\\u00e9"  # numbers
ws-two ::= [ \\t]*
ws ::= ws-two
"""


def test_gbnf_and_ebnf_are_compiled(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for text in ("1", "-12, 3", "éé,4"):
        assert is_answer(compiler, tokenizer, "grammar", GBNF, text)
    assert not is_answer(compiler, tokenizer, "grammar", GBNF, "x")
    assert is_answer(compiler, tokenizer, "grammar", 'root ::= "yes" | "no"', "no")
    assert is_answer(compiler, tokenizer, "grammar", 'root ::= a\n  | "no"\n  | "maybe"\na ::= "yes"\n', "maybe")
    assert is_answer(compiler, tokenizer, "grammar", 'start: "yes" | "no"', "no")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a', "Unexpected end of input"),
        ("root ::= other", "Rule 'other' not found"),
        ('item ::= "a"', "No 'root' rule found"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nest less deeply"),
        ("root ::= [a-z]{1,99999}", "at most 10000"),
        ("\n".join(f'r{number} ::= "a"' for number in range(1100)) + "\nroot ::= r1", "at most 1000"),
        (
            "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(900)) + '\nr900 ::= "a"',
            "at most 100 rules that refer to each other in a chain",
        ),
    ],
)
def test_a_gbnf_grammar_that_is_wrong_or_hostile_is_rejected(
    compiler: GrammarCompiler, grammar: str, reason: str
) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=reason):
        compiler.begin({"type": "grammar", "value": grammar})
    assert compiler.begin({"type": "grammar", "value": 'root ::= "yes"'}).failure is None


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("regex", "(a", "use a valid regex: unclosed group"),
        ("regex", "a$b", "use a valid regex: lookarounds not supported"),
        ("json_schema", {"not": {}}, 'the keywords "not" cannot be enforced: leave them out'),
        ("json_schema", {"oneOf": [{}, {}]}, "oneOf cannot be enforced where its schemas overlap: use anyOf"),
    ],
)
def test_errors_are_about_what_the_client_wrote(compiler: GrammarCompiler, kind: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidSamplingParamsError) as raised:
        compiler.begin({"type": kind, "value": value})
    assert reason in str(raised.value)
    assert "start:" not in str(raised.value)


KEYWORDS = st.sampled_from(
    [
        *("properties", "patternProperties", "$defs", "items", "prefixItems", "additionalProperties", "anyOf", "allOf"),
        *("oneOf", "$ref", "required", "minProperties", "format", "pattern", "not", "type", "unevaluatedProperties"),
        *("#/$defs/a", "a", "(?=x", "["),
    ]
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | KEYWORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(KEYWORDS, ANY_JSON, max_size=5), st.booleans(), st.booleans())
def test_no_schema_is_too_odd_to_be_normalised(schema: dict[str, Any], closes: bool, is_strict: bool) -> None:
    before = json.dumps(schema)
    known, _ = normalised(schema, closes=closes, is_strict=is_strict)
    assert json.dumps(schema) == before
    assert normalised(known, closes=closes, is_strict=is_strict)[1] == []


@given(st.text(alphabet=r"\[]()?=!<>^-dDwWsSb1pP{}xa", max_size=30))
def test_no_expression_is_too_odd_to_be_rewritten(pattern: str) -> None:
    unsupported(pattern)
    rewritten = with_ascii_classes(pattern)
    assert with_ascii_classes(rewritten) == rewritten


def test_a_definition_behind_many_references_stays_open() -> None:
    count = 20_000
    definitions = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)}
    schema = {"$defs": {**definitions, f"d{count}": OBJECT}, "allOf": [{"$ref": "#/$defs/d0"}, OTHER]}
    known, _ = normalised(schema, closes=True)
    assert "additionalProperties" not in known["$defs"][f"d{count}"]
