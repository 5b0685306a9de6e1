"""Validation tables of InferenceConfig and SamplingParams: one rule per field, with its bounds as data."""

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
    """Predicate that is true for numbers from `minimum` to `maximum`; with is_whole, for integers only.

    Booleans are no numbers.
    """

    minimum: float
    maximum: float
    is_whole: bool = False

    def __call__(self, value: Any) -> bool:
        # NaN is within no bounds. Integers beyond the range of floats compare exactly.
        is_number = is_int(value) or (not self.is_whole and isinstance(value, float))
        return is_number and self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        return f"{'an integer' if self.is_whole else 'a number'} from {self.minimum:,} to {self.maximum:,}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The valid values of a field.

    is_valid: whether a value is valid.
    allowed:  describes the valid values.
    bounds:   bounds of the field's number, or of each number in its list or map; None: no bounds.
    """

    is_valid: Predicate
    allowed: str
    bounds: Bounds | None = None


FLAG = Rule(lambda value: isinstance(value, bool), "true or false")


def bounded(bounds: Bounds, note: str = "", *, or_none: bool = False) -> Rule:
    """Return the rule of a field whose value is a number within `bounds`. note: the meaning of special values."""
    allowed = f"{bounds}{f' ({note})' if note else ''}{', or None' if or_none else ''}"
    return Rule(optional(bounds) if or_none else bounds, allowed, bounds)


def field_rules(kind: Any, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules by field of the dataclass `kind`. Fields with a bool default take true or false.

    rules: rule by the names, separated by spaces, of the fields that share it.
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
