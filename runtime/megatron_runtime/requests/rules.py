"""Validation tables of InferenceConfig and SamplingParams: one predicate and one description per field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeAlias

Predicate: TypeAlias = Callable[[Any], bool]
Rule: TypeAlias = tuple[str, Predicate, str]
"""Names of fields separated by spaces, the predicate of a valid value, and its description."""

ABOVE_ZERO = math.ulp(0.0)
"""The smallest positive float."""


def field_rules(kind: Any, *rules: Rule) -> tuple[Rule, ...]:
    """Return one rule per field of the dataclass `kind`. Fields with a bool default take true or false."""
    flags = " ".join(item.name for item in fields(kind) if isinstance(item.default, bool))
    every: tuple[Rule, ...] = (*rules, (flags, lambda value: isinstance(value, bool), "true or false"))
    return tuple((name, is_valid, allowed) for names, is_valid, allowed in every for name in names.split())


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def int_in(low: int, high: float = math.inf) -> Predicate:
    return lambda value: is_int(value) and low <= value <= high


def number_in(low: float, high: float) -> Predicate:
    # Integers beyond the range of floats compare exactly, so they are rejected here.
    return lambda value: (is_int(value) or (isinstance(value, float) and math.isfinite(value))) and low <= value <= high


def optional(predicate: Predicate) -> Predicate:
    return lambda value: value is None or predicate(value)


def list_of(kind: type) -> Predicate:
    return lambda value: (
        isinstance(value, list | tuple) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
    )
