"""JSON without non-finite numbers: RFC 8259 does not allow them, and parsers other than Python's reject the whole text.

The functions have the names and options of the standard library's module json, which the linter bans elsewhere:

    from megatron_runtime.protocol import strict_json as json

When written, non-finite numbers become null. When read, they are an error, and so is 1e999, which overflows a float.
"""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON; numbers that are not finite become null. options: options of json.dumps().

    Raises:
        ValueError: allow_nan=False is given, and there are such numbers.
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
        ValueError: it is not JSON, or has a number that is not finite.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_reject, parse_float=_finite_float)


def raw_decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at index `start`, and the index of its end. Raises the errors of loads()."""
    return json.JSONDecoder(parse_constant=_reject, parse_float=_finite_float).raw_decode(text, start)


def loads_python(text: str | bytes | bytearray) -> Any:
    """Return the value of a text as Python's json writes it, with NaN and Infinity.

    Only for model files: transformers writes such numbers into config.json. Raises the errors of loads().
    """
    return json.loads(text)


def finite(value: Any) -> Any:
    """Return `value` with every non-finite number replaced by None. value: consists of JSON's types."""
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
