"""Escapes untrusted text before it is written to a log, a status or a terminal."""

from __future__ import annotations

_MAX_CHARACTERS = 120
_MAX_BITS = 128


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with every invisible character escaped.

    Control characters, ANSI sequences, bidirectional overrides, zero-width characters and line breaks become `\x1b`,
    `\u202e`, `\n`. Escaping twice changes nothing.

    Args:
        lines: keep line feeds, for text of several lines that this program has composed.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def shown(value: object) -> str:
    """Return `value` as short printable text for an error message or a log line.

    Control characters and lone surrogates are escaped, and long text is truncated. Containers are shown only by type
    and length, because a nested value of a few bytes can have a representation of gigabytes.
    """
    if isinstance(value, str):
        return f"'{escaped(value)}'"
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _MAX_BITS else f"an integer of {value.bit_length()} bits"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def escaped(text: str) -> str:
    """Return `text` as shown() does, but without quotes."""
    cut = printable(text[:_MAX_CHARACTERS])
    return cut if len(text) <= _MAX_CHARACTERS else f"{cut}… ({len(text)} characters)"
