"""Formats and parsers of tool calls with JSON arguments, most of which are between markers."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron_runtime.server.formats.call_grammars import (
    KEYS,
    CallGrammar,
    Keys,
    Schemas,
    Written,
    all_calls,
    any_call,
    dumped,
    keyed_calls,
    list_of_calls,
    quoted,
    written_head,
)
from megatron_runtime.server.formats.head import Head
from megatron_runtime.server.formats.parser import Reading, ToolParser

Body: TypeAlias = Literal["object", "list", "keyed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """The format in which a family of models writes tool calls between markers, with JSON arguments.

    open:    texts, one of which precedes the tool calls.
    bodies:  what can follow one of `open`. "object": one or several `{"name": …, "arguments": {…}}`; "list": a list of
             such objects; "keyed": a list of `{name: {…}}`.
    keys:    the keys of `{"name": …, "arguments": {…}}` in this family.
    heads:   texts that contain the name of the function and precede its arguments. A tool call with a head has no body.
    end:     text after each tool call that is not in a list. A model can omit this text.
    close:   text after the last tool call. A model can omit this text.
    dropped: texts of the format between calls that are not part of the answer.
    """

    open: tuple[str, ...]
    bodies: tuple[Body, ...] = ("object", "list")
    keys: Keys = KEYS
    heads: tuple[Head, ...] = ()
    end: str = ""
    close: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All literal texts in the format."""
        return (*self.open, *(head.spec for head in self.heads), self.end, self.close, *self.dropped)

    def parser(self, tools: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        return _JsonCallParser(self, tools)

    def grammar(self, tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
        """Return the grammar of the text that follows an opening text (one of `open`) in an answer.

        See call_grammars.
        """
        rules: list[str] = []
        calls: list[str] = []
        lists: list[str] = []
        for body in self.bodies:
            match body:
                case "object":
                    rules.append(f"object: %json {dumped(any_call(tools, keys=self.keys))}")
                    calls.append("object")
                case "list":
                    rules.append(f"list: %json {dumped(list_of_calls(tools, is_single=is_single, keys=self.keys))}")
                    lists.append("list")
                case "keyed":
                    rules.append(f"list: %json {dumped(keyed_calls(tools, is_single=is_single))}")
                    lists.append("list")
        for place, (name, schema) in enumerate(tools.items() if self.heads else ()):
            holes = {"name": quoted(name), "index": "/[0-9]{1,4}/", "id": "/[0-9A-Za-z_-]{1,64}/"}
            heads = " | ".join(written_head(head, written, **holes) for head in self.heads)
            rules.append(f"call_{place}: ({heads}) SPACE? %json {dumped(schema)}")
            calls.append(f"call_{place}")
        if calls:
            end = f" SPACE? {written(self.end)}" if self.end else ""
            rules.append(f"call: SPACE? ({' | '.join(calls)}){end}")
            lists.append("call" if is_single or not self.close else "call+")
        close = f" (SPACE? {written(self.close)})?" if self.close else ""
        return all_calls(self.open, f"SPACE? ({' | '.join(lists)}){close}", rules, written, is_single=is_single)


class _JsonCallParser(ToolParser):
    """Parses answers with text and tool calls. One of the opening texts in JsonCalls precedes the tool calls."""

    def __init__(self, calls: JsonCalls, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._calls = calls
        super().__init__(tools)

    def _read(self) -> Reading:
        while True:
            marker = yield from self._read_text(*self._calls.open, *self._calls.dropped)
            if marker in self._calls.dropped:
                self._flush()
            else:
                yield from self._read_calls()

    def _read_calls(self) -> Reading:
        """Read the tool calls after the opening text. Emit no text after the last tool call."""
        close, before = self._calls.close, self._num_calls
        continues = True
        while continues:
            continues = yield from self._read_next()
            if not close or self._num_calls == before:
                return
            if (yield from self._read_end(close)):
                self._flush()
                return

    def _read_next(self) -> Generator[None, None, bool]:
        """Read one tool call, or a list of tool calls.

        Return False if no tool call follows or a tool call is malformed.
        """
        calls = self._calls
        until = calls.end or calls.close
        name: str | None = None
        if calls.heads and (head := (yield from self._read_head(*calls.heads))) is not None:
            name = head[1]["name"]
            self._at = head[1].end()
        elif not calls.bodies:
            return False
        else:
            token = yield from self._token()
            if token == "[" and calls.bodies != ("object",):
                return (yield from self._read_call_list(until=until, is_keyed="keyed" in calls.bodies))
            self._at -= len(token)
            if token != "{":
                return False
        is_call = yield from self._read_call(name=name, until=until)
        if is_call and calls.end and (yield from self._read_end(calls.end)):
            self._flush()
        return is_call


class Llama3JsonParser(ToolParser):
    """Parses answers of Llama 3: one or several `{"name": …, "parameters": {…}}`, separated by `;`, as the whole
    answer.

    If the answer does not begin with an object that names a tool, the whole answer is text.
    """

    TAG = "<|python_tag|>"
    _SEPARATORS = re.compile(r"(?:[ \t\r\n;]|<\|python_tag\|>)*")
    is_marked = False

    def _read(self) -> Reading:
        while True:
            self._in_call = self._num_calls > 0  # text between calls is dropped
            yield from self._read_space(self._SEPARATORS, marker=self.TAG)
            if self._in_call:
                self._flush()
            self._in_call = False
            if not (yield from self._read_call()):
                break
        yield from self._read_text()


class Functionary32Parser(ToolParser):
    """Parses answers of Functionary 3.2, which consist of messages to recipients: `all\\ntext>>>name\\n{…}`.

    The prompt contains the beginning of the first message.

    A message to `all` is text, and a message to a tool is a tool call. Any other message is text, including its marker.
    """

    OPEN = ">>>"
    is_marked = False
    _TO_ALL, _TO_TOOL = Head("all{?\n}"), Head("{name} {?{}")

    def _read(self) -> Reading:
        while True:
            head = yield from self._read_head(self._TO_ALL, self._TO_TOOL)
            if head is not None and head[0] is self._TO_ALL:
                self._at = head[1].end() + 1
                self._flush()
            elif head is not None and self._accepts(name := head[1]["name"]):
                self._at = head[1].end()
                yield from self._read_call(name=name)
            yield from self._read_text(self.OPEN)
