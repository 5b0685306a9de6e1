"""Text of foreign origin on its way to a status, an Event, a log or a terminal."""

from __future__ import annotations

from typing import Any


def printable(text: str, *, lines: bool = False) -> str:
    """Escape every character that a reader cannot see: control characters, ANSI sequences, bidirectional overrides,
    zero-width characters and line breaks become `\\x1b`, `\\u202e`, `\\n`. Escaping twice changes nothing.

    Args:
        lines: keep line feeds, for text of several lines that this program has put together itself.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def printable_data(value: Any, *, limit: int) -> Any:
    """Plain data, such as a status, with every string in it escaped and no longer than `limit` characters."""
    if isinstance(value, str):
        return printable(value)[:limit]
    if isinstance(value, dict):
        return {key: printable_data(each, limit=limit) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(each, limit=limit) for each in value]
    return value
