"""Limits of the grammars that clients send. The checks read only the text, without the compiler.

The grammar compiler recurses along nesting and along chains of rules or definitions. On a thread stack of 8 MiB, it
overflows at 2,600 chained Lark rules and at 900 chained `$ref` definitions. The limits are far below these numbers, and
reject most hostile grammars early. The limits cannot guarantee that the compiler survives. Therefore, a grammar within
the limits is first compiled in a process that may crash (see grammar_compiler). This module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_dialects import is_gbnf

MAX_GRAMMAR_BYTES = 64 * 1024  # size of the description, as JSON or text
MAX_NESTING = 64  # nesting depth of a JSON schema's values, and of brackets in a regular expression or grammar
MAX_RULES = 1000  # rules and terminals of a grammar
MAX_RULE_CHAIN = 100  # length of a chain of rules or terminals that refer to each other
MAX_DEFINITIONS = 400  # entries of all `$defs` and `definitions` of a JSON schema
MAX_REFERENCE_CHAIN = 50  # length of a chain of `$ref` in a JSON schema
MAX_ALTERNATIVES = 4096  # choices, alternatives of a grammar or regular expression, and entries of an `enum`
MAX_SUBSCHEMAS = 256
MAX_PROPERTIES = 1000
MAX_REPETITIONS = 10_000  # highest bound of a repetition in a regular expression or grammar
MAX_MULTIPLE_OF = 10_000  # the number without its decimal point; the compiler creates this many states

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""Options of the compiler for JSON. They limit white space, because a small model may generate white space
endlessly.
"""

# Limits of the entries in one list or object of a JSON schema, by keyword.
_MAX_ENTRIES = {
    **dict.fromkeys(("properties", "patternProperties"), MAX_PROPERTIES),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), MAX_SUBSCHEMAS),
    "enum": MAX_ALTERNATIVES,
}
_SHORTEN = "bytes of description: shorten it"
_OPENING, _CLOSING = "([{", ")]}"
# These patterns match hostile text, so no pattern may backtrack more than a few hundred characters.
_BRACES = re.compile(r"\{([\d, ~]{1,60})\}")
_NUMBER = re.compile(r"\d+")
# The lexemes of llguidance's dialect of Lark.
_LEXEME = re.compile(
    r"""
    (?P<skip>       [ \t]+ | (?:\#|//)[^\n]* )
  | (?P<newline>    (?:\r?\n)+ )
  | (?P<json>       %(?:json|regex|llguidance) )
  | (?P<string>     "(?:[^"\\\x00-\x1f\x7f]|\\.)*"i? )
  | (?P<expression> /(?:\\.|[^/\\])+/[imslux]* )
  | (?P<hexadecimal> 0[xX][0-9a-fA-F]+ )
  | (?P<number>     [+-]?[0-9]+ )
  | (?P<name>       !?[_?]?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* )
  | (?P<other>      %[a-z]+ | <[^<>\s]+> | @[a-zA-Z0-9_-]+ | -> | :: | \.\. | [][(){}:,.~|&=_+*?] )
    """,
    re.VERBOSE,
)
_Node = TypeVar("_Node", int, str)


def check_structure(structure: Mapping[str, Any]) -> None:
    """Check `structure` against the limits of this module. The time is proportional to the size of `structure`.

    structure: as in SamplingParams.structured_output.

    Raises InvalidSamplingParamsError if a limit is exceeded. The message has the value, the limit and the remedy.
    """
    kind, value = str(structure["type"]), structure.get("value")
    if kind == "json_object":
        return
    if kind == "choice":
        _at_most(kind, len(value or ()), MAX_ALTERNATIVES, "choices: offer fewer")
    _check_values(kind, value)
    try:
        # This check comes last, because json.dumps() recurses and holds the interpreter lock until it returns.
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        size = len(text.encode(errors="replace"))
    except (TypeError, ValueError) as error:  # for example bytes, integers of thousands of digits, or 1e999
        raise InvalidSamplingParamsError(
            "structured_output", kind, f"a {kind} that JSON can express: {error}"
        ) from error
    _at_most(kind, size, MAX_GRAMMAR_BYTES, _SHORTEN)
    if kind == "json_schema":
        _check_references(kind, value)
    elif kind == "regex":
        _check_expression(kind, value or "")
    elif kind == "grammar" and is_gbnf(value or ""):
        _check_expression(kind, str(value))  # the rules are checked later, in Lark's notation
    elif kind == "grammar":
        _check_rules(kind, value or "")


def _at_most(kind: str, number: int, limit: int, remedy: str) -> None:
    if number > limit:
        raise InvalidSamplingParamsError("structured_output", kind, f"at most {limit} {remedy} (it has {number})")


def _check_expression(kind: str, text: str) -> None:
    _at_most(kind, len(text), MAX_GRAMMAR_BYTES, _SHORTEN)
    _at_most(kind, _nesting(text), MAX_NESTING, "brackets inside each other: nest less deeply")
    _at_most(kind, text.count("|") + 1, MAX_ALTERNATIVES, "alternatives: use fewer")
    for braces in _BRACES.finditer(text):
        for bound in map(int, _NUMBER.findall(braces[1])):
            _at_most(kind, bound, MAX_REPETITIONS, "repetitions: use a lower bound in braces")


class _Lexeme(NamedTuple):
    """A lexeme of a grammar. If it is JSON text that follows %json or similar, it also has the JSON value."""

    kind: str
    text: str
    value: Any = None


def _lexemes(kind: str, text: str) -> Iterator[_Lexeme]:
    """Yield the lexemes into which the compiler splits the text.

    Raises InvalidSamplingParamsError if a part of the text is not a lexeme.
    """
    at = 0
    while at < len(text):
        match = _LEXEME.match(text, at)
        if match is None:
            allowed = f"a valid {kind}: no lexeme of Lark begins at character {at}, {text[at : at + 10]!r}"
            raise InvalidSamplingParamsError("structured_output", kind, allowed)
        at, name, value = match.end(), match.lastgroup or "", None
        if name == "json":
            start = len(text) - len(text[at:].lstrip(" \t\r\n"))
            try:
                value, at = json.raw_decode(text, start)
            except (ValueError, RecursionError) as error:
                allowed = f"a valid {kind}: {match[0]} needs a JSON value: {error}"
                raise InvalidSamplingParamsError("structured_output", kind, allowed) from error
        if name != "skip":
            yield _Lexeme(name, match[0], value)


def _check_rules(kind: str, text: str) -> None:
    """Raise InvalidSamplingParamsError if a grammar exceeds the limits.

    This function also checks the regular expressions, schemas and %lark grammars inside the grammar.
    """
    _at_most(kind, len(text), MAX_GRAMMAR_BYTES, _SHORTEN)
    if text.lstrip().startswith("{"):
        # The compiler would read a JSON object as several grammars, in a notation that this module does not check.
        raise InvalidSamplingParamsError("structured_output", kind, "a Lark grammar: give a JSON schema as json_schema")
    depth, deepest, alternatives, rules, before = 0, 0, 1, 0, ""
    scope = current = "0 "
    outer: list[tuple[int, str, str]] = []
    """Depth, scope and rule around each open %lark."""
    names: list[str] = []
    """Names that are not assigned to a rule yet."""
    bodies: dict[str, list[str]] = {}
    for lexeme in _lexemes(kind, text):
        match lexeme:
            case _Lexeme("newline"):
                bodies.setdefault(current, []).extend(names)
                names = []
            case _Lexeme("name"):
                names.append(scope + lexeme.text.lstrip("!?"))
            case _Lexeme("other", ":"):  # this line defines the rule with its first name
                bodies.setdefault(current, []).extend(names[1:])
                rules, current, names = rules + 1, (names or [current])[0], []
            case _Lexeme("other", "(" | "[" | "{"):
                depth += 1
                deepest = max(deepest, depth)
                if before == "%lark":
                    outer.append((depth, scope, current))
                    scope = f"{rules} "
                    bodies.setdefault(current, []).extend([*names, f"{scope}start"])
                    current, names = scope, []
            case _Lexeme("other", ")" | "]" | "}"):
                if outer and outer[-1][0] == depth:
                    bodies.setdefault(current, []).extend(names)
                    _, scope, current = outer.pop()
                    names = []
                depth = max(0, depth - 1)
            case _Lexeme("other", "|"):
                alternatives += 1
            case _Lexeme("number") if before != "=":  # attributes such as max_tokens=100000 create no states
                bound = int(lexeme.text) if len(lexeme.text) < 10 else MAX_REPETITIONS + 1
                _at_most(kind, bound, MAX_REPETITIONS, "repetitions: use a lower bound")
            case _Lexeme("expression"):
                _check_expression(kind, lexeme.text)
                alternatives += lexeme.text.count("|")
            case _Lexeme("json"):
                _check_values(kind, lexeme.value)
                _check_references(kind, lexeme.value)
        before = lexeme.text
    for count, limit, remedy in (
        (deepest, MAX_NESTING, "brackets inside each other: nest less deeply"),
        (alternatives, MAX_ALTERNATIVES, "alternatives: use fewer"),
        (rules, MAX_RULES, "rules and terminals: use fewer"),
    ):
        _at_most(kind, count, limit, remedy)
    bodies.setdefault(current, []).extend(names)
    edges = {name: [other for other in dict.fromkeys(body) if other in bodies] for name, body in bodies.items()}
    _at_most(kind, _longest_chain(edges), MAX_RULE_CHAIN, "rules that refer to each other in a chain: merge rules")


def _nesting(text: str) -> int:
    """Return an upper bound of the nesting depth of brackets. Brackets of any kind count, even escaped brackets."""
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(0, depth - 1)
    return deepest


def _check_values(kind: str, root: Any) -> None:
    size = definitions = 0
    for value, depth in _values(root):
        # `size` is a lower bound of the size as JSON: each value, name and character takes at least a byte.
        size += 1 + (len(value) if isinstance(value, str | bytes) else 0)
        if isinstance(value, dict):
            size += sum(len(name) for name in value if isinstance(name, str))
        _at_most(kind, size, MAX_GRAMMAR_BYTES, _SHORTEN)
        _at_most(kind, depth, MAX_NESTING, "levels of nesting: nest less deeply")
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in _MAX_ENTRIES and isinstance(inner, dict | list):
                _at_most(kind, len(inner), _MAX_ENTRIES[name], f"entries in {name}: use fewer")
            elif name in ("$defs", "definitions") and isinstance(inner, dict):
                definitions += len(inner)
            elif name == "multipleOf" and isinstance(inner, int | float) and _states(inner) > MAX_MULTIPLE_OF:
                allowed = f"multipleOf of at most {MAX_MULTIPLE_OF} without its decimal point: leave it out or lower it"
                raise InvalidSamplingParamsError("structured_output", kind, allowed)
            elif name == "pattern" and isinstance(inner, str):
                _check_expression(kind, inner)
            if name == "patternProperties" and isinstance(inner, dict):
                for pattern in inner:
                    _check_expression(kind, str(pattern))
    _at_most(kind, definitions, MAX_DEFINITIONS, "definitions in $defs: use fewer")


def _states(multiple: float) -> Decimal:
    """Return the estimated number of states that the compiler creates for a `multipleOf`.

    The estimate is `multiple` without its decimal point, for example 9999 for 99.99.
    """
    if not math.isfinite(multiple):
        return Decimal(0)  # NaN and infinities are not JSON
    exponent = Decimal(repr(multiple)).normalize().as_tuple().exponent
    return Decimal(repr(multiple)).scaleb(-min(0, int(exponent)))


def _values(root: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value in a JSON value, as pairs (value, depth). The root has depth 1."""
    waiting = [(root, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, depth + 1) for inner in value]


def _check_references(kind: str, schema: Any) -> None:
    """Raise InvalidSamplingParamsError if a chain of schemas is too long.

    Each schema of a chain contains the next schema or refers to it. Only schemas that are targets of a `$ref` count.
    They can be anywhere in the root schema.
    """
    references: set[str] = set()
    named: dict[str, Any] = {"#": schema}
    for value, _ in _values(schema):
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            if isinstance(value.get("$anchor"), str):
                named[f"#{value['$anchor']}"] = value
            if isinstance(value.get("$id"), str):
                named[value["$id"]] = named[value["$id"].rpartition("/")[2]] = value
    targets = {reference: id(_target(schema, reference, named)) for reference in references}
    starts = {id(schema), *targets.values()}
    edges: dict[int, list[int]] = {start: [] for start in starts}
    waiting = [(schema, id(schema))]
    while waiting:
        value, start = waiting.pop()
        if id(value) in starts and id(value) != start:
            edges[start].append(id(value))
            start = id(value)
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                edges[start].append(targets[value["$ref"]])
            waiting += [(inner, start) for inner in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, start) for inner in value]
    length = _longest_chain({start: list(dict.fromkeys(others)) for start, others in edges.items()})
    _at_most(kind, length, MAX_REFERENCE_CHAIN, "$ref that lead to each other in a chain: write definitions in place")


def _target(root: Any, reference: str, named: Mapping[str, Any]) -> Any:
    """Return the schema to which a `$ref` refers by $anchor, $id or JSON pointer (RFC 6901).

    Return None if there is no such schema.

    An $id is looked up by its last segment, because it can be relative to another $id.
    """
    if reference in named:
        return named[reference]
    place, _, pointer = reference.partition("#")
    if pointer and not pointer.startswith("/"):
        return named.get(f"#{pointer}")
    value = named.get(place, named.get(place.rpartition("/")[2])) if place else root
    for part in unquote(pointer).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and len(part) < 10 and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _longest_chain(edges: Mapping[_Node, Sequence[_Node]]) -> int:
    """Return the length of the longest path of a depth-first walk, which is the compiler's recursion depth.

    A cycle ends a path.
    """
    longest, length = 0, dict.fromkeys(edges, 0)
    for start in edges:
        if length[start]:
            continue
        path, following = [start], [iter(edges[start])]
        entered = {start}
        while path:
            name = next((name for name in following[-1] if name not in entered), None)
            if name is None:
                done = path.pop()
                following.pop()
                entered.discard(done)
                length[done] = 1 + max((length[other] for other in edges[done]), default=0)
                longest = max(longest, length[done])
            elif not length[name]:
                path.append(name)
                following.append(iter(edges[name]))
                entered.add(name)
    return longest
