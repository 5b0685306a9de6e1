"""Follow JSON character by character, as a model writes it: where a value ends, and whether it still can be JSON."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 256

_SPACE = " \t\n\r"
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SCALAR_START = frozenset("-0123456789tfn")
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_MAX_SCALAR = 400
_ESCAPES = frozenset('"\\/bfnrt')
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSER = {"{": "}", "[": "]"}


class Verdict(Enum):
    """What one more character did to a value."""

    MORE = auto()
    DONE = auto()
    """The character ended the value."""
    BEFORE = auto()
    """The value ended before the character, which is not part of it."""
    INVALID = auto()


class JsonScanner:
    """One JSON value; leading white space is allowed. Not to be fed after it is done or invalid."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expects = "value"
        self._scalar = ""
        self._is_key = False
        self._digits = 0

    def feed(self, character: str) -> Verdict:
        step = getattr(self, f"_in_{self._expects}")
        verdict: Verdict = step(character)
        return verdict

    def _in_value(self, character: str) -> Verdict:
        if character in _SPACE:
            return Verdict.MORE
        if character == '"':
            self._is_key = False
            return self._then("string")
        if character in _CLOSER:
            if len(self._open) == MAX_DEPTH:
                return Verdict.INVALID
            self._open.append(character)
            return self._then("first_key" if character == "{" else "first_item")
        if character in _SCALAR_START:
            self._scalar = character
            return self._then("scalar")
        return Verdict.INVALID

    def _in_first_item(self, character: str) -> Verdict:
        return self._close() if character == "]" else self._in_value(character)

    def _in_first_key(self, character: str) -> Verdict:
        return self._close() if character == "}" else self._in_key(character)

    def _in_key(self, character: str) -> Verdict:
        if character in _SPACE:
            return Verdict.MORE
        self._is_key = True
        return self._then("string") if character == '"' else Verdict.INVALID

    def _in_colon(self, character: str) -> Verdict:
        if character in _SPACE:
            return Verdict.MORE
        return self._then("value") if character == ":" else Verdict.INVALID

    def _in_after(self, character: str) -> Verdict:
        if character in _SPACE:
            return Verdict.MORE
        inside = self._open[-1]
        if character == ",":
            return self._then("key" if inside == "{" else "value")
        return self._close() if character == _CLOSER[inside] else Verdict.INVALID

    def _in_string(self, character: str) -> Verdict:
        if character == "\\":
            return self._then("escape")
        if character == '"':
            return self._then("colon") if self._is_key else self._ended()
        return Verdict.MORE if character >= " " else Verdict.INVALID

    def _in_escape(self, character: str) -> Verdict:
        if character == "u":
            self._digits = 4
            return self._then("hexadecimal")
        return self._then("string") if character in _ESCAPES else Verdict.INVALID

    def _in_hexadecimal(self, character: str) -> Verdict:
        self._digits -= 1
        if character not in _HEXADECIMAL:
            return Verdict.INVALID
        return self._then("string") if self._digits == 0 else Verdict.MORE

    def _in_scalar(self, character: str) -> Verdict:
        if character in _SCALAR_CHARACTERS:
            self._scalar += character
            return Verdict.MORE if len(self._scalar) <= _MAX_SCALAR else Verdict.INVALID
        if _SCALAR.fullmatch(self._scalar) is None:
            return Verdict.INVALID
        return Verdict.BEFORE if self._ended() is Verdict.DONE else self._in_after(character)

    def _then(self, expects: str) -> Verdict:
        self._expects = expects
        return Verdict.MORE

    def _close(self) -> Verdict:
        self._open.pop()
        return self._ended()

    def _ended(self) -> Verdict:
        self._expects = "after"
        return Verdict.MORE if self._open else Verdict.DONE
