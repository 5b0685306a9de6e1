"""JSON without non-finite numbers. RFC 8259 does not allow them, and JSON parsers other than Python's reject them.

The functions have the names and options of the standard library's module json, which the linter bans elsewhere:

    from megatron_runtime.protocol import strict_json as json

The functions write non-finite numbers as null. Reading a non-finite number is an error, and so is reading 1e999, which
overflows a float.
"""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for numbers that are not finite. options: options of json.dumps().

    Raises:
        ValueError: `value` has numbers that are not finite, and `options` has allow_nan=False.
    """
    if "allow_nan" in options:
        return json.dumps(value, **options)
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or has a number that is not finite.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_constant=_reject, parse_float=_finite_float)


def raw_decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at index `start`, and its end index. Raises the errors of loads()."""
    return json.JSONDecoder(parse_constant=_reject, parse_float=_finite_float).raw_decode(text, start)


def loads_python(text: str | bytes | bytearray) -> Any:
    """Return the value of a text that Python's json has written, which can contain NaN and Infinity.

    Use this function only for model files, because transformers writes such numbers into config.json. Raises the errors
    of loads().
    """
    return json.loads(text)


def finite(value: Any) -> Any:
    """Return a copy of `value` in which every non-finite number is replaced by None. `value` has only JSON's types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {finite(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _reject(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number: give a finite number, or null")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large: give one of at most 1.7976931348623157e308")
    return number
