"""Forwards the text of a JSON object while a model is writing the text.

All forwarded parts together are the text of a JSON object, even if the model writes other text.
"""

from __future__ import annotations

import re

from megatron_runtime.protocol import strict_json as json

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_SCALAR_CHARACTERS = frozenset("+-.0123456789eEtrufalsn")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGIN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_CLOSER = {"{": "}", "[": "]"}
MAX_SCALAR_CHARACTERS = 400


class JsonPrefix:
    """Reads the text of a JSON object in parts of any size.

    When the text can no longer become an object, feed() forwards no further text. In this case, finish() completes the
    object, and adds the whole text as the value of a last key `arguments`.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._held = ""
        """Text that was read but not forwarded, because its end has not arrived: an escape sequence, a number, a
        literal, or the text after the last member.
        """
        self._expects = "object"
        self._is_key = False
        self._closers: list[str] = []
        self._is_broken = False

    def feed(self, text: str) -> str:
        """Read the next part of the text, and return the text that can now be forwarded."""
        self._texts.append(text)
        if self._is_broken:
            return ""
        text, at = self._held + text, 0
        if not self._closers:
            text = text.lstrip(_SPACE)
        while at < len(text) and not self._is_broken:
            end = self._read(text, at)
            if end == at:  # more text must follow
                break
            at = end
        self._held = "" if self._is_broken else text[at:]
        return text[:at]

    def finish(self) -> str:
        """Return the rest of the text to forward, after the last call of feed().

        If the model's object is truncated, the forwarded object is truncated too.
        """
        if not self._is_broken:
            return self._held
        expects, inner = self._expects, self._closers[1:]
        member = f'"arguments":{json.dumps("".join(self._texts))}}}'
        if not self._closers:
            return "{" + member
        if not inner and expects in ("first key", "key"):
            return member
        ends = {"colon": ":null", "value": "null", "item": "null", "key": '"":null'}
        end = ('":null' if self._is_key else '"') if expects == "string" else ends.get(expects, "")
        return f"{end}{''.join(reversed(inner))},{member}"

    def _read(self, text: str, at: int) -> int:
        """Read the next expected token. Return the index of its end, or `at` if the token is incomplete or invalid."""
        char, expects = text[at], self._expects
        if expects == "string":
            return self._read_string(text, at)
        if char in _SPACE:
            return at + 1
        if expects == "object" and char == "{":
            self._open(char)
        elif expects in ("key", "first key") and char == '"':
            self._expects, self._is_key = "string", True
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects in ("value", "item", "first item") and char in '"{[':
            if char == '"':
                self._expects, self._is_key = "string", False
            else:
                self._open(char)
        elif expects in ("value", "item", "first item") and char in _SCALAR_CHARACTERS:
            return self._read_scalar(text, at)
        elif expects == "separator" and char == ",":
            self._expects = "key" if self._closers[-1] == "}" else "item"
        elif expects in ("separator", "first key", "first item") and char == self._closers[-1]:
            if len(self._closers) == 1:  # hold the last bracket, because invalid text may follow it
                self._is_broken = bool(text[at + 1 :].strip(_SPACE))
                return at
            self._closers.pop()
            self._expects = "separator"
        else:
            self._is_broken = True
        return at if self._is_broken else at + 1

    def _open(self, bracket: str) -> None:
        self._closers.append(_CLOSER[bracket])
        self._expects = "first key" if bracket == "{" else "first item"

    def _read_string(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._expects = "colon" if self._is_key else "separator"
            return at + 1
        pattern = _ESCAPE if text[at] == "\\" else _PLAIN
        if (match := pattern.match(text, at)) is not None:
            return match.end()
        self._is_broken = _ESCAPE_BEGIN.fullmatch(text, at) is None
        return at

    def _read_scalar(self, text: str, at: int) -> int:
        end = at
        while end < len(text) and text[end] in _SCALAR_CHARACTERS:
            end += 1
        if end == len(text) and end - at <= MAX_SCALAR_CHARACTERS:
            return at
        if _SCALAR.fullmatch(text, at, end) is None:
            self._is_broken = True
            return at
        self._expects = "separator"
        return end
