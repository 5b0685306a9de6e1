"""Foreign values in messages: short, printable, and never larger than what they describe."""

from __future__ import annotations

from megatron_runtime.protocol.text import printable

_MOST_CHARACTERS = 120
_MOST_BITS = 128


def shown(value: object) -> str:
    """Return `value` for an error message or a log line.

    Control characters and lone surrogates are escaped, long text is cut, and containers are named by type and length
    only: a nested value of a few bytes can have a representation of gigabytes.
    """
    if isinstance(value, str):
        return f"'{escaped(value)}'"
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _MOST_BITS else f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict | set | frozenset | bytes | bytearray):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def escaped(text: str) -> str:
    """Return `text` as shown() has it, without quotes."""
    cut = printable(text[:_MOST_CHARACTERS])
    return cut if len(text) <= _MOST_CHARACTERS else f"{cut}… ({len(text)} characters)"
