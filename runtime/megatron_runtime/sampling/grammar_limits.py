"""Limits of the grammars that clients send, checked on their text: no compiler, no torch.

The grammar compiler recurses along nesting and along chains of rules or definitions. On a thread stack of 8 MiB it
overflows at 2,600 chained Lark rules and at 900 chained `$ref` definitions. These limits lie well below, and reject
most hostile grammars early. They are no proof: a grammar within them is first compiled in a process that may crash
(see grammar_compiler).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError

MAX_GRAMMAR_BYTES = 64 * 1024  # of the description, as JSON or text
MAX_NESTING = 64  # levels of a JSON schema's values, and of brackets in a regular expression or grammar
MAX_RULES = 1000  # rules and terminals of a grammar
MAX_RULE_CHAIN = 100  # rules or terminals of a grammar that refer to each other in a chain
MAX_DEFINITIONS = 400  # entries of all `$defs` and `definitions` of a JSON schema
MAX_REFERENCE_CHAIN = 50  # `$ref` of a JSON schema that lead to each other in a chain
MAX_ALTERNATIVES = 4096  # choices, alternatives of a grammar or regular expression, and entries of an `enum`
MAX_SUBSCHEMAS = 256
MAX_PROPERTIES = 1000
MAX_REPETITIONS = 10_000  # highest bound in braces of a regular expression or grammar
MAX_MULTIPLE_OF = 10_000  # the compiler creates as many states

# Limits of the entries in one list or object of a JSON schema, by keyword.
_MAX_ENTRIES = {
    **dict.fromkeys(("properties", "patternProperties"), MAX_PROPERTIES),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), MAX_SUBSCHEMAS),
    "enum": MAX_ALTERNATIVES,
}
_SHORTEN = "bytes of description: shorten it"
_OPENING, _CLOSING = "([{", ")]}"
# Hostile text is matched: no pattern may backtrack further than a few hundred characters.
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w{0,99})(?!\w)[^:\n]{0,100}:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACES = re.compile(r"\{([\d, ~]{1,60})\}")
_NUMBER = re.compile(r"\d+")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"?')


def check_structure(structure: Mapping[str, Any]) -> None:
    """Check a description against the limits of this module, in time proportional to its size.

    structure: as in SamplingParams.structured_output.

    Raises InvalidSamplingParamsError with the value, the limit and the remedy.
    """
    kind, value = str(structure["type"]), structure.get("value")
    if kind == "json_object":
        return
    if kind == "choice":
        _at_most(kind, len(value or ()), MAX_ALTERNATIVES, "choices: offer fewer")
    _check_values(kind, value)
    try:
        # Last: json.dumps() recurses, and holds the interpreter lock until it returns.
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        size = len(text.encode(errors="replace"))
    except (TypeError, ValueError) as error:  # bytes, integers of thousands of digits, 1e999
        raise InvalidSamplingParamsError(
            "structured_output", kind, f"a {kind} that JSON can express: {error}"
        ) from error
    _at_most(kind, size, MAX_GRAMMAR_BYTES, _SHORTEN)
    if kind == "json_schema":
        _check_references(kind, value)
    elif kind == "regex":
        _check_expression(kind, value or "")
    elif kind == "grammar":
        _check_rules(kind, value or "")


def _at_most(kind: str, found: int, limit: int, remedy: str) -> None:
    if found > limit:
        raise InvalidSamplingParamsError("structured_output", kind, f"at most {limit} {remedy} (it has {found})")


def _check_expression(kind: str, text: str) -> None:
    _at_most(kind, len(text), MAX_GRAMMAR_BYTES, _SHORTEN)
    _at_most(kind, _nesting(text), MAX_NESTING, "brackets inside each other: nest less deeply")
    _at_most(kind, text.count("|") + 1, MAX_ALTERNATIVES, "alternatives: use fewer")
    for found in _BRACES.finditer(text):
        for bound in map(int, _NUMBER.findall(found[1])):
            _at_most(kind, bound, MAX_REPETITIONS, "repetitions: use a lower bound in braces")


def _check_rules(kind: str, text: str) -> None:
    _check_expression(kind, _LITERAL.sub('""', text))
    found = list(_RULE.finditer(text))
    _at_most(kind, len(found), MAX_RULES, "rules and terminals: use fewer")
    ends = [*(match.start() for match in found[1:]), len(text)]
    bodies = {match[1]: text[match.end() : end] for match, end in zip(found, ends, strict=False)}
    names = {
        name: [other for other in dict.fromkeys(_NAME.findall(_LITERAL.sub("", body))) if other in bodies]
        for name, body in bodies.items()
    }
    _at_most(kind, _longest_chain(names), MAX_RULE_CHAIN, "rules that refer to each other in a chain: merge rules")


def _nesting(text: str) -> int:
    """Return an upper bound of the nesting of brackets: escaped brackets and those of another kind count as well."""
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
        # A lower bound of the size as JSON: every value, name and character takes at least a byte.
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
            elif name == "multipleOf" and isinstance(inner, int | float) and inner > MAX_MULTIPLE_OF:
                allowed = f"multipleOf of at most {MAX_MULTIPLE_OF}: leave it out or lower it"
                raise InvalidSamplingParamsError("structured_output", kind, allowed)
            elif name == "pattern" and isinstance(inner, str):
                _check_expression(kind, inner)
    _at_most(kind, definitions, MAX_DEFINITIONS, "definitions in $defs: use fewer")


def _values(root: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value with its depth; the root has depth 1."""
    waiting = [(root, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, depth + 1) for inner in value]


def _check_references(kind: str, schema: Any) -> None:
    """Check the longest chain of definitions, each of which has a `$ref` to the next."""
    nodes = {"#": schema}
    for name in ("$defs", "definitions"):
        inner = schema.get(name) if isinstance(schema, dict) else None
        if isinstance(inner, dict):
            nodes |= {f"#/{name}/{key}": value for key, value in inner.items()}
    edges = {
        name: [reference for reference in dict.fromkeys(_references(node)) if reference in nodes]
        for name, node in nodes.items()
    }
    length = _longest_chain(edges)
    _at_most(kind, length, MAX_REFERENCE_CHAIN, "$ref that lead to each other in a chain: write definitions in place")


def _references(node: Any) -> Iterator[str]:
    for value, _ in _values(node):
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            yield value["$ref"]


def _longest_chain(edges: Mapping[str, Sequence[str]]) -> int:
    """Return the length of the longest path of a depth-first walk, as the compiler recurses. A cycle ends a path."""
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
