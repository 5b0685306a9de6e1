"""The format and the parser of tool calls in which each argument is a text between tags."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.formats.call_grammars import (
    CallGrammar,
    Schemas,
    ToolParameter,
    Written,
    all_calls,
    dumped,
    parameters_of,
    quoted,
    until,
    written_head,
)
from megatron_runtime.server.formats.head import Head
from megatron_runtime.server.formats.parser import CallArguments, Event, Reading, Text, ToolParser
from megatron_runtime.server.formats.pythonic import literal_of

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_TYPE_OF_STRING = 'string="{type}"'
_STRING_TYPES = frozenset({"true", "string"})
"""Values of the `{type}` of a parameter that mark a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """The format in which a family of models writes tool calls with arguments between tags.

    open:       texts, one of which precedes the tool calls.
    call:       text before the arguments of a tool call, with the hole `{name}`.
    parameter:  text before a value, with the hole `{key}`, and the hole `{type}` if the format has types.
    value_end:  text after a value.
    call_end:   text after the arguments of a tool call. Empty: a tool call ends with its last argument.
    close:      text after the last tool call. A model can omit this text.
    is_padded:  whether a newline before and after each value is part of the format.
    dropped:    texts of the format outside of tool calls, which are not part of the answer.
    headers:    texts that are left out of the answer if they are at its beginning or follow one of `dropped`.
    """

    open: tuple[str, ...]
    call: Head
    parameter: Head
    value_end: str
    call_end: str = ""
    close: str
    is_padded: bool = False
    dropped: tuple[str, ...] = ()
    headers: tuple[Head, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All literal texts in the format."""
        heads = [head.spec for head in (self.call, self.parameter, *self.headers)]
        return (*self.open, *heads, self.value_end, self.call_end, self.close, *self.dropped)

    def parser(self, tools: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        return _TaggedCallParser(self, tools)

    def grammar(self, tools: Schemas, written: Written, is_single: bool) -> CallGrammar:
        """Return the grammar of the text that follows an opening text (one of `open`) in an answer. See call_grammars.

        In the grammar, parameters are in the order of their declaration.
        """
        rules: list[str] = []
        for place, (name, schema) in enumerate(tools.items()):
            parts = [written_head(self.call, written, name=quoted(name), index="/[0-9]{1,4}/")]
            for number, parameter in enumerate(parameters_of(schema)):
                value = f"value_{place}_{number}"
                kind = parameter.kind if parameter.is_json else "string"
                if _TYPE_OF_STRING in self.parameter.spec:
                    kind = str(kind == "string").lower()
                elif kind == "integer":
                    kind = "number"
                head = written_head(self.parameter, written, key=quoted(parameter.name), type=quoted(kind))
                parts.append(f"({head} {value}){'' if parameter.is_required else '?'}")
                rules += self._value(value, parameter, written)
            rules.append(f"call_{place}: {' '.join(parts)}")
        calls = " | ".join(f"call_{place}" for place in range(len(tools)))
        close = f"SPACE? {written(self.close)}"
        if self.call_end:
            rules.append(f"call: ({calls}) SPACE? {written(self.call_end)}")
            return all_calls(
                self.open, f"call{'' if is_single else '+'} ({close})?", rules, written, is_single=is_single
            )
        return all_calls(self.open, f"({calls}) {close}", rules, written, is_single=is_single)

    def _value(self, rule: str, parameter: ToolParameter, written: Written) -> list[str]:
        """Return the grammar rules for a parameter's value and the text after it.

        rule:    name of the rule to define.
        written: returns the grammar of a literal text.
        """
        values = ""
        if parameter.kind == "boolean":  # some models write Python's True and False
            values = '"true" | "false" | "True" | "False"'
        elif parameter.is_json:
            values = f"%json {dumped(parameter.schema)}"
        elif parameter.choices:
            values = " | ".join(map(quoted, parameter.choices))
        if values:
            return [f"{rule}: SPACE? ({values}) SPACE? {written(self.value_end)}"]
        attributes, text = until(self.value_end, written)
        return [f"{rule}{attributes}: {text}"]


class _TaggedCallParser(ToolParser):
    """Parses answers with text and tool calls. The parser emits each argument when it is complete.

    The parser converts each value to JSON with value_of().
    """

    def __init__(self, calls: TaggedCalls, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._calls = calls
        self._close = Head(f" {calls.close}")
        self._call_end = Head(f" {calls.call_end}") if calls.call_end else None
        super().__init__(tools)

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events.

        If a tool call is truncated, the text after its last complete argument becomes text of the answer.
        """
        self._at = len(self._buffer)
        if self._in_call:
            self._kind = Text
        return super().finish()

    def _read(self) -> Reading:
        yield from self._read_header()
        while True:
            marker = yield from self._read_text(*self._calls.open, *self._calls.dropped)
            if marker in self._calls.dropped:
                self._flush()
                yield from self._read_header()
            else:
                yield from self._read_calls()

    def _read_header(self) -> Reading:
        if self._calls.headers and (head := (yield from self._read_head(*self._calls.headers))) is not None:
            self._at = head[1].end()
            self._flush()

    def _read_calls(self) -> Reading:
        """Read the tool calls after the opening text. Emit no text after the last tool call."""
        while (head := (yield from self._read_head(self._calls.call))) is not None:
            self._at = head[1].end()
            self._begin(head[1]["name"])
            if (yield from self._read_arguments(head[1]["name"])):
                return
            head = yield from self._read_head(self._close, self._calls.call)
            if head is not None and head[0] is self._close:
                self._at = head[1].end()
                self._flush()
                return

    def _read_arguments(self, name: str) -> Generator[None, None, bool]:
        """Read the rest of a tool call after its head. Return whether this tool call was the last."""
        properties = self._tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        ends = (self._close,) if self._call_end is None else (self._call_end, self._close)
        separator = "{"
        while True:
            match = yield from self._read_head(self._calls.parameter, *ends)
            if match is None or match[0] is not self._calls.parameter:
                break
            head = match[1]
            self._at = head.end()
            if not (yield from self._read_value()):
                match = None
                break
            text = self._take_read()[len(head[0]) : -len(self._calls.value_end)]
            if self._calls.is_padded:
                text = text.removeprefix("\n").removesuffix("\n")
            key = head["key"]
            kind = head.groupdict().get("type")
            value = json.dumps(text, ensure_ascii=False) if kind in _STRING_TYPES else value_of(text, schemas.get(key))
            self._events.append(CallArguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
            separator = ", "
        self._events.append(CallArguments("{}" if separator == "{" else "}"))
        self._in_call = False
        if match is None:  # text that cannot continue the call becomes text of the answer
            self._kind = Text
            yield from self._read_until(self._calls.close)
            self._at += len(self._calls.close)
        else:
            self._at = match[1].end()
        self._flush()
        return match is None or match[0] is self._close

    def _read_value(self) -> Generator[None, None, bool]:
        """Read a value and its terminator, and return True.

        If the tool call ends before the terminator, read only the value and return False.
        """
        markers = (self._calls.value_end, self._calls.close)
        while True:
            places = [(place, marker) for marker in markers if (place := self._buffer.find(marker, self._at)) >= 0]
            if places:
                break
            self._read_but(*markers)
            yield
        self._at, marker = min(places)
        if marker == self._calls.close:
            return False
        self._at += len(marker)
        return True


def value_of(text: str, schema: Any) -> str:
    """Return the value of a parameter as JSON. schema: JSON schema of the parameter.

    A text that is a JSON value is returned unchanged if the schema can allow this value. Lists and objects in Python
    syntax, and strings in CDATA, are converted to JSON. Any other text becomes a JSON string.
    """
    if text.startswith(_CDATA) and text.endswith(_CDATA_END):
        return json.dumps(text[len(_CDATA) : -len(_CDATA_END)], ensure_ascii=False)
    allowed = schema.get("type") if isinstance(schema, Mapping) else None
    if allowed != "string":
        try:
            if not isinstance(json.loads(text), str):
                return text
        except (ValueError, RecursionError):
            with contextlib.suppress(ValueError, TypeError):  # not a Python literal, or one without a JSON equivalent
                value = literal_of(text)
                if isinstance(value, dict | list) or (isinstance(value, bool) and allowed == "boolean"):
                    return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)
