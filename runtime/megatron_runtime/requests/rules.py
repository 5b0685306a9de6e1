"""Validation rules for the fields of InferenceConfig and SamplingParams.

The bounds in a rule are data, from which the OpenAI server derives the types of its request fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Predicate: TypeAlias = Callable[[Any], bool]

ABOVE_ZERO = math.ulp(0.0)
"""The smallest positive float."""
MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """A predicate that is true for numbers from `minimum` to `maximum`. If is_whole is set, only integers fit.

    Booleans do not count as numbers.
    """

    minimum: float
    maximum: float
    is_whole: bool = False

    def __call__(self, value: Any) -> bool:
        # NaN is never within bounds. Integers beyond the range of floats compare exactly.
        is_number = is_int(value) or (not self.is_whole and isinstance(value, float))
        return is_number and self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        return f"{'an integer' if self.is_whole else 'a number'} from {self.minimum:,} to {self.maximum:,}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The valid values of a field.

    is_valid: returns whether a value is valid.
    allowed:  text that describes the valid values.
    bounds:   bounds of the number in the field, or of each number in its list or map; None: no bounds.
    """

    is_valid: Predicate
    allowed: str
    bounds: Bounds | None = None


FLAG = Rule(lambda value: isinstance(value, bool), "true or false")


def bounded(bounds: Bounds, note: str = "", *, or_none: bool = False) -> Rule:
    """Return the rule for a field whose value is a number within `bounds`. note: describes the meaning of special
    values.
    """
    allowed = f"{bounds}{f' ({note})' if note else ''}{', or None' if or_none else ''}"
    return Rule(optional(bounds) if or_none else bounds, allowed, bounds)


def field_rules(kind: Any, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules of the fields of the dataclass `kind`, by name of the field.

    A field whose default is a bool gets the rule FLAG, which allows only true and false.

    rules: maps the names of the fields that share a rule, separated by spaces, to the rule.
    """
    flags = {item.name: FLAG for item in fields(kind) if isinstance(item.default, bool)}
    return {name: rule for names, rule in rules.items() for name in names.split()} | flags


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, float)


def int_in(low: int, high: float = math.inf) -> Bounds:
    return Bounds(low, high, is_whole=True)


def number_in(low: float, high: float) -> Bounds:
    return Bounds(low, high)


def optional(predicate: Predicate) -> Predicate:
    return lambda value: value is None or predicate(value)


def list_of(is_item: Predicate) -> Predicate:
    return lambda value: isinstance(value, list | tuple) and all(map(is_item, value))


def is_text(value: object) -> bool:
    return isinstance(value, str)
