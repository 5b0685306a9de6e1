"""`[get_weather(city="Paris"), get_time()]` as the whole answer: a Python list of calls with literal arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from typing import Any, ClassVar

from megatron_runtime.server.tools.parser import ToolParser

_OPENERS, _CLOSERS = "([{", ")]}"
_MAX_CALL_CHARACTERS = 256 * 1024
_MAX_DEPTH = 64


class PythonicParser(ToolParser):
    """An answer that begins with `[name(` of a tool is calls; every other answer is text. A call is given out whole."""

    is_marked: ClassVar[bool] = False

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._mode = "start"
        self._raw = ""  # since the last call that was given out
        self._call = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _step(self, character: str) -> None:
        if self._mode == "text":
            self._text(character)
            return
        self._raw += character
        if self._mode == "start":
            if character == "[":
                self._mode = "list"
            elif not character.isspace():
                self._becomes_text()
        elif not self._in_list(character) or len(self._raw) > _MAX_CALL_CHARACTERS:
            self._becomes_text()

    def _in_list(self, character: str) -> bool:
        """Return whether the text can still be a list of calls."""
        if self._quote:
            self._in_string(character)
        elif self._depth == 0 and character in ",]":
            return self._ends_call(character)
        elif character in "'\"":
            self._quote = character
        elif character in _OPENERS:
            if character == "(" and self._depth == 0 and not self.sink.accepts(self._call.strip()):
                return False
            self._depth += 1
        elif character in _CLOSERS:
            self._depth -= 1
        self._call += character
        return 0 <= self._depth <= _MAX_DEPTH

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == self._quote:
            self._quote = ""

    def _ends_call(self, character: str) -> bool:
        is_trailing_comma = not self._call.strip() and self._has_calls and character == "]"
        if not is_trailing_comma:
            call = _read_call(self._call)
            if call is None:
                return False
            self._begin(call[0])
            self._arguments(call[1])
        self._raw = self._call = ""
        if character == "]":
            self._mode = "text"
        return True

    def _becomes_text(self) -> None:
        self._mode = "text"
        text, self._raw = self._raw, ""
        self._text(text)

    def _end(self) -> None:
        self._text(self._raw)


def _read_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a call whose arguments are literals given by keyword; else None."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        arguments: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        return ast.unparse(tree.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
