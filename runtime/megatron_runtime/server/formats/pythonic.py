"""Parsers for tool calls in Python syntax, with literals as arguments."""

from __future__ import annotations

import ast
from collections.abc import Generator
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.formats.parser import Reading, StringReading, ToolParser, is_unicode

_MAX_LITERAL_CHARACTERS = 64 * 1024
_JSON_NAMES = {"null": None, "true": True, "false": False}


class PythonicParser(ToolParser):
    """Parses answers of Llama 3.2 and 4, which are text or a Python list of tool calls `[name(argument="value"), …]`.

    If the answer does not begin with `[`, the name of a tool and `(`, the whole answer is text. The parser emits each
    tool call when it is complete.
    """

    is_marked = False
    MAX_CALL_CHARACTERS = 256 * 1024
    MAX_DEPTH = 64

    def _read(self) -> Reading:
        yield from self._read_list()
        yield from self._read_text()

    def _character(self) -> StringReading:
        while self._at == len(self._buffer):
            yield
        self._at += 1
        return self._buffer[self._at - 1]

    def _read_list(self) -> Generator[None, None, bool]:
        """Read to the end of the list of tool calls, and return True.

        Stop at the first character that cannot be part of such a list, and return False.
        """
        while (character := (yield from self._character())).isspace():
            pass
        if character != "[":
            self._at -= 1
            return False
        call: list[str] = []
        depth, quote = 0, ""
        while 0 <= depth <= self.MAX_DEPTH and len(call) <= self.MAX_CALL_CHARACTERS:
            character = yield from self._character()
            if quote:
                if character == "\\":
                    call.append(character)
                    character = yield from self._character()
                elif character == quote:
                    quote = ""
                elif character == "\n":  # some models write an unescaped newline in a string
                    character = "\\n"
            elif depth == 0 and character in ",]":
                text = "".join(call).strip()
                is_trailing_comma = not text and self._num_calls and character == "]"
                if not is_trailing_comma:
                    if (read := _python_call(text)) is None:
                        return False
                    self._begin(*read)
                    self._in_call = False
                call.clear()
                self._flush()
                if character == "]":
                    return True
                continue
            elif character in "'\"":
                quote = character
            elif character in "([{":
                if character == "(" and depth == 0 and not self._accepts("".join(call).strip()):
                    return False
                depth += 1
            elif character in ")]}":
                depth -= 1
            call.append(character)
        return False


class Lfm2Parser(PythonicParser):
    """Parses answers of LFM2: text, then `<|tool_call_start|>[name(argument="value"), …]<|tool_call_end|>`."""

    OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
    is_marked = True

    def _read(self) -> Reading:
        while True:
            yield from self._read_text(self.OPEN)
            if (yield from self._read_list()) and (yield from self._read_end(self.CLOSE)):
                self._flush()


def literal_of(text: str) -> Any:
    """Return the value of a Python literal, which may also contain `true`, `false` and `null`. Raises ValueError."""
    if len(text) > _MAX_LITERAL_CHARACTERS:
        raise ValueError(f"the text has {len(text)} characters: at most {_MAX_LITERAL_CHARACTERS} are allowed")
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` in a syntax tree by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _python_call(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a tool call in Python syntax.

    Return None if an argument is positional or is not a literal.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        arguments: dict[str, Any] = {str(keyword.arg): _literal(keyword.value) for keyword in tree.keywords}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return (ast.unparse(tree.func), written) if is_unicode(written) else None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
