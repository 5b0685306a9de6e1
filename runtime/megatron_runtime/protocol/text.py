"""Text of foreign origin on its way to a log, a status or a terminal."""

from __future__ import annotations


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
