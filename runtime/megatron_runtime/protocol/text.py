"""Escaping of untrusted text before it reaches a log, a status or a terminal."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    """Escape every invisible character: control characters, ANSI sequences, bidirectional overrides,
    zero-width characters and line breaks become `\\x1b`, `\\u202e`, `\\n`. Escaping twice changes nothing.

    Args:
        lines: keep line feeds, for text of several lines that this program has composed.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
