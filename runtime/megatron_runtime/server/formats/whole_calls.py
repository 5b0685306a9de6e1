"""Parsers for tool calls whose arguments have a special syntax. They translate a tool call when it is complete."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.formats.head import Head
from megatron_runtime.server.formats.parser import MAX_JSON_DEPTH, Reading, ToolParser, is_unicode
from megatron_runtime.server.formats.tagged_calls import value_of

MAX_CALL_CHARACTERS = 1 << 20
"""Maximum length of a tool call in characters.

A longer tool call is returned as text, because a tool call is held until it is complete.
"""


class WholeCallParser(ToolParser):
    """Parses answers with text and tool calls. The tool calls follow the text OPEN.

    Each tool call consists of a head, a body and an end.
    """

    OPEN: str
    HEAD: Head
    END: str
    CLOSE = ""
    """Text after the last tool call. A model can omit this text."""

    @abstractmethod
    def arguments(self, name: str, body: str) -> dict[str, Any]:
        """Return the arguments of a call of the tool `name`. Raises ValueError if `body` has no valid arguments."""

    def _read(self) -> Reading:
        while True:
            yield from self._read_text(self.OPEN)
            while (head := (yield from self._read_head(self.HEAD))) is not None:
                begin = len("".join(self._held)) + head[1].end() - self._start
                self._at = head[1].end()
                size = 0
                while (place := self._buffer.find(self.END, self._at)) < 0 and size <= MAX_CALL_CHARACTERS:
                    size -= self._at
                    self._read_but(self.END)
                    size += self._at
                    yield
                if place < 0 or size + place - self._at > MAX_CALL_CHARACTERS:
                    break
                self._at = place
                body = self._peek()[begin:]
                self._at += len(self.END)
                try:
                    written = json.dumps(self.arguments(head[1]["name"], body), ensure_ascii=False, allow_nan=False)
                except (ValueError, RecursionError):
                    break
                if not is_unicode(written):
                    break
                self._begin(head[1]["name"], written)
                self._in_call = False
                if not self.CLOSE:
                    break
                if (yield from self._read_end(self.CLOSE)):
                    self._flush()
                    break

    def _peek(self) -> str:
        """Return the text that has been consumed but not emitted, without dropping it."""
        return "".join(self._held) + self._buffer[self._start : self._at]


class Gemma4Parser(WholeCallParser):
    """Parses Gemma 4's tool calls: `<|tool_call>call:name{key:<|"|>value<|"|>,…}<tool_call|>`.

    The notation has no escape sequences in keys and strings.
    """

    OPEN, HEAD, END = "<|tool_call>", Head("call:{name}{?{}"), "<tool_call|>"
    QUOTE = '<|"|>'
    _KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:")
    _SCALAR = re.compile(r"[^,\[\]{}]*")
    _NAMES = {"None": None, "True": True, "False": False}  # noqa: RUF012

    def arguments(self, name: str, body: str) -> dict[str, Any]:
        value, end = self._literal(body, 0, depth=0)
        if not isinstance(value, dict) or body[end:].strip():
            raise ValueError("the arguments are not one object")
        return value

    def _literal(self, text: str, at: int, *, depth: int) -> tuple[Any, int]:
        """Return the value that begins at index `at`, and the index of the end of the value."""
        if depth > MAX_JSON_DEPTH:
            raise ValueError("the arguments are nested too deeply")
        if text.startswith(self.QUOTE, at):
            return self._quoted(text, at)
        if text.startswith("{", at):
            members: dict[str, Any] = {}
            at += 1
            while not text.startswith("}", at):
                if text.startswith(self.QUOTE, at):
                    key, at = self._quoted(text, at)
                    if not text.startswith(":", at):
                        raise ValueError("a key has no value")
                    at += 1
                else:
                    match = self._KEY.match(text, at)
                    if match is None:
                        raise ValueError("a key is missing")
                    key, at = match[1], match.end()
                members[key], at = self._literal(text, at, depth=depth + 1)
                at = self._separated(text, at, "}")
            return members, at + 1
        if text.startswith("[", at):
            items: list[Any] = []
            at += 1
            while not text.startswith("]", at):
                item, at = self._literal(text, at, depth=depth + 1)
                items.append(item)
                at = self._separated(text, at, "]")
            return items, at + 1
        match = self._SCALAR.match(text, at)
        written = "" if match is None else match[0].strip()
        if not written:
            raise ValueError("a value is missing")
        end = at if match is None else match.end()
        if written in self._NAMES:
            return self._NAMES[written], end
        try:
            return json.loads(written), end
        except ValueError:
            return written, end

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        begin = at + len(self.QUOTE)
        end = text.index(self.QUOTE, begin)
        return text[begin:end], end + len(self.QUOTE)

    def _separated(self, text: str, at: int, closer: str) -> int:
        """Return the index of the next item or of the closing bracket `closer`, after an item that ends at `at`."""
        if text.startswith(closer, at):
            return at
        if not text.startswith(",", at):
            raise ValueError("a comma is missing")
        return at + 1


class MiniMaxM3Parser(WholeCallParser):
    """Parses MiniMax M3's tool calls: `<invoke name="…"><key>value</key>…</invoke>`.

    A marker precedes each tag, and elements can be nested. A property of an object is an element with the property's
    name. An item of a list is an element `item`.
    """

    TAG = "]<]minimax[>["
    OPEN, HEAD = f"{TAG}<tool_call>", Head(f' {TAG}<invoke name="{{name}}">')
    END, CLOSE = f"{TAG}</invoke>", f"{TAG}</tool_call>"
    _ELEMENT = re.compile(re.escape(TAG) + r"<([^<>/][^<>]{0,255})>")

    def arguments(self, name: str, body: str) -> dict[str, Any]:
        value, end = self._content(body, 0, {"type": "object", **self._tools.get(name, {})}, depth=0)
        if not isinstance(value, dict) or body[end:].strip():
            raise ValueError("the arguments are not elements")
        return value

    def _content(self, text: str, at: int, schema: Any, *, depth: int) -> tuple[Any, int]:
        """Parse the content of an element, which begins at index `at`. Return its value and the index of its end.

        Nested elements give a dict or a list. Text is converted according to `schema`.
        """
        if depth > MAX_JSON_DEPTH:
            raise ValueError("the arguments are nested too deeply")
        schema = schema if isinstance(schema, Mapping) else {}
        properties, item_schema = schema.get("properties"), schema.get("items")
        names: list[str] = []
        values: list[Any] = []
        while (match := self._ELEMENT.match(text, at)) is not None:
            key = match[1]
            inner = properties.get(key) if isinstance(properties, Mapping) else None
            value, at = self._content(text, match.end(), item_schema if key == "item" else inner, depth=depth + 1)
            closing = f"{self.TAG}</{key}>"
            if not text.startswith(closing, at):
                raise ValueError(f"the element {key} is not closed")
            at += len(closing)
            names.append(key)
            values.append(value)
        kind = schema.get("type")
        if names:
            is_list = kind == "array" or (kind != "object" and set(names) == {"item"})
            return (values if is_list else dict(zip(names, values, strict=True))), at
        end = text.find(self.TAG, at)
        end = len(text) if end < 0 else end
        written = text[at:end]
        if not written.strip() and kind in ("object", "array"):
            return ({} if kind == "object" else []), end
        return json.loads(value_of(written, schema)), end
