"""Converts JSON schemas, regular expressions and grammars to formats that the grammar compiler accepts.

A client's schema can have keywords that the compiler does not support. `normalised` removes keywords that only restrict
the answer further. An answer that matches the remaining schema is still JSON of the right structure. The sets below
describe llguidance 1 and JSON Schema, drafts 4 to 2020-12. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NARROWING = frozenset(
    {
        *("not", "if", "then", "else", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)
"""Keywords that the compiler lacks and that only restrict a schema further."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
_NULLABLE = frozenset({"const", "default"})
"""Keywords whose value can be null. Serializers write null for any other keyword that is not set."""
_IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose inner schemas describe the same value as the outer schema."""
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = frozenset({"properties", "patternProperties", *_DEFINITIONS})
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({*_IN_PLACE, "prefixItems", "items"})
_DECLARING = frozenset({"properties", "patternProperties", "additionalProperties", "$ref", *_IN_PLACE})

_LOOK_AROUND = re.compile(r"\((?:\?<?[=!]|\?>|\?\()")
_TOKEN = re.compile(r"\\(?:[pPx]\{[^}]{0,64}\}|.)|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x20\t\n\r\f\v"}
_ESCAPES = frozenset("dDwWsSnrtfvaxuUpPAz")
"""Letters and digits that can follow a backslash. Other letters and digits would be assertions or group references."""
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w-]*[ \t]*::=")
_GBNF_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def normalised(schema: Mapping[str, Any], *, closes: bool, is_strict: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return a schema that the compiler supports, and the keywords that this schema does not enforce.

    is_strict: whether to keep `oneOf`. The compiler rejects `oneOf` unless the alternatives are disjoint. If False,
               `oneOf` becomes `anyOf`.
    closes: whether to forbid properties that an object's schema does not declare, unless the schema allows them
            explicitly, and whether a schema with properties and without a type describes an object. An object without
            declared properties can have any properties.
    """
    normaliser = _Normaliser(schema, closes=closes, keeps_one_of=is_strict)
    return normaliser.schema(schema, is_combined=False), sorted(normaliser.dropped)


class _Normaliser:
    """Converts one JSON schema to a schema that the compiler supports.

    dropped: the keywords that the conversion has removed.
    """

    def __init__(self, root: Mapping[str, Any], *, closes: bool, keeps_one_of: bool) -> None:
        self.dropped: set[str] = set()
        self._keeps_one_of = keeps_one_of
        self._closes = closes
        self._combined = _combined_definitions(root)

    def schema(self, schema: Any, *, is_combined: bool, pointer: str = "#") -> Any:
        """Return the normalised schema. is_combined: whether another schema declares properties of the same object."""
        if not isinstance(schema, Mapping):
            return schema
        schema = {key: value for key, value in schema.items() if value is not None or key in _NULLABLE}
        inner_combined = is_combined or _combines(schema)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if self._is_dropped(key, value, schema):
                self.dropped.add(key)
            elif key in _DEFINITIONS and isinstance(value, Mapping):
                result[key] = {
                    name: self.schema(item, is_combined=f"{pointer}/{key}/{name}" in self._combined)
                    for name, item in value.items()
                }
            elif key in _BY_NAME and isinstance(value, Mapping):
                kept = {name: item for name, item in value.items() if self._is_known_name(key, name)}
                result[key] = {name: self.schema(item, is_combined=False) for name, item in kept.items()}
            elif key in _LISTS and isinstance(value, list):
                is_in_place = key in _IN_PLACE
                items = [self.schema(item, is_combined=is_in_place and inner_combined) for item in value]
                result[self._name_of(key, schema)] = items
            elif key in _SINGLE:
                result[key] = self.schema(value, is_combined=False)
            else:
                result[key] = value
        if self._closes and not is_combined and _is_closed(schema):
            result["additionalProperties"] = False
        if self._closes and schema.get("properties"):
            result.setdefault("type", "object")
        return result

    def _is_dropped(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        if key in ("minProperties", "maxProperties"):  # the compiler cannot count optional properties
            required = schema.get("required")
            return not set(_names(schema.get("properties"))) <= set(_names(required))
        if key == "format":
            is_text = schema.get("type") not in ("integer", "number", "boolean", "null", "object", "array")
            return is_text and isinstance(value, str) and value not in _FORMATS
        return key in _NARROWING or (key == "pattern" and isinstance(value, str) and unsupported(value) is not None)

    def _is_known_name(self, key: str, name: str) -> bool:
        is_known = key != "patternProperties" or unsupported(name) is None
        if not is_known:
            self.dropped.add(key)
        return is_known

    def _name_of(self, key: str, schema: Mapping[str, Any]) -> str:
        """Return the keyword that replaces `key` in the normalised schema.

        This is `key` itself, except that `oneOf` can become `anyOf`, because the compiler accepts `oneOf` only if the
        alternatives are disjoint.
        """
        if key == "oneOf" and not self._keeps_one_of and "anyOf" not in schema:
            self.dropped.add(key)
            return "anyOf"
        return key


def _names(value: Any) -> Iterator[str]:
    yield from (item for item in value if isinstance(item, str)) if isinstance(value, Mapping | list) else ()


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Return whether properties that `schema` does not declare can be forbidden."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties or "additionalProperties" in schema or "$ref" in schema:
        return False
    if schema.get("unevaluatedProperties") not in (None, False):
        return False
    lists = (value for key in _IN_PLACE if isinstance(value := schema.get(key), list))
    members = (item for items in lists for item in items if isinstance(item, Mapping))
    # A required property that is not declared must be allowed as an additional property.
    return set(_names(schema.get("required"))) <= set(properties) and all(_DECLARING.isdisjoint(m) for m in members)


def _combines(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas can declare properties of the object that `schema` describes."""
    parts = [*(key for key in _IN_PLACE if key in schema), *(("$ref",) if "$ref" in schema else ())]
    members = schema.get("allOf")
    return "properties" in schema or len(parts) > 1 or (isinstance(members, list) and len(members) > 1)


def _combined_definitions(root: Mapping[str, Any]) -> set[str]:
    """Return JSON pointers to the definitions of `root` that describe an object which another schema also describes."""
    combined: set[str] = set()
    leads_to: dict[str, set[str]] = {}
    """For each definition, the definitions that describe the same value."""
    waiting: list[tuple[Any, bool, str | None]] = [(root, False, None)]
    while waiting:
        schema, is_combined, definition = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        inner = is_combined or _combines(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if inner:
                combined.add(reference)
            if definition is not None:
                leads_to.setdefault(definition, set()).add(reference)
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                waiting += [
                    (item, False, f"#/{key}/{name}" if schema is root and key in _DEFINITIONS else None)
                    for name, item in value.items()
                ]
            elif key in _LISTS and isinstance(value, list):
                is_in_place = key in _IN_PLACE
                waiting += [(item, is_in_place and inner, definition if is_in_place else None) for item in value]
            elif key in _SINGLE:
                waiting.append((value, False, None))
    following = list(combined)
    while following:
        for reference in leads_to.get(following.pop(), ()):
            if reference not in combined:
                combined.add(reference)
                following.append(reference)
    return combined


def unsupported(pattern: str) -> str | None:
    """Return the first part of a regular expression that no grammar can express, or None if there is no such part.

    Such parts are look-around and group references, because they depend on text other than the next characters. The
    compiler reports all other errors.
    """
    in_class = 0
    for token in _TOKEN.findall(pattern):
        if token.startswith("["):
            in_class += 1
        elif token == "]":
            in_class = max(0, in_class - 1)
        elif token.startswith("\\"):
            is_letter = token[1:2].isascii() and token[1:2].isalnum()
            if is_letter and token[1] not in _ESCAPES:
                return str(token)
        elif not in_class and (match := _LOOK_AROUND.search(token)) is not None:
            return match[0]
    return None


def with_ascii_classes(pattern: str) -> str:
    r"""Return the regular expression `pattern`, changed so that `\d`, `\w`, `\s` and their negations match only
    ASCII.
    """
    parts: list[str] = []
    in_class = 0
    for token in _TOKEN.findall(pattern):
        if token.startswith("["):
            in_class += 1
        elif token == "]":
            in_class = max(0, in_class - 1)
        letter = token[1:] if token.startswith("\\") else ""
        members = _ASCII.get(letter.lower())
        if members is None:
            parts.append(token)
        elif letter.islower():
            parts.append(members if in_class else f"[{members}]")
        else:
            parts.append(f"[^{members}]")
    return "".join(parts)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation (GBNF) or XGrammar's notation (EBNF), and not in Lark's."""
    return _GBNF_RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """Convert a GBNF or EBNF grammar to Lark's notation. Raises ValueError for an invalid grammar.

    The running time is not limited, so only the trial process may call this function.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    def character(match: re.Match[str]) -> str:
        code = int(match[1], 16)
        return chr(code) if code >= 0xA0 and not 0xD800 <= code < 0xE000 else match[0]

    lines = [""]
    for line in _GBNF_ESCAPE.sub(character, grammar).split("\n"):
        if line.lstrip().startswith("|") and "#" not in lines[-1]:  # EBNF continues a rule on the next line
            lines[-1] = f"{lines[-1]} {line.strip()}"
        else:
            lines.append(line)
    try:
        return str(gbnf_to_lark("\n".join(lines)))
    except Exception as error:
        raise ValueError(f"as GBNF, {error}") from error
