"""How models write tool calls: parsers of their answers, and a description of tools for models without a format.

A parser takes text in any partition and returns text and calls; the partition does not change the result.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from megatron_runtime.server.tools.json_calls import Call, MalformedError, Reading, next_token


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Comes once for each call, before its arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments of the call that began last."""

    text: str


Event = Text | CallBegin | CallArguments


class ToolParser(ABC):
    """Reads the answer of one choice.

    names:     the tools of the request.
    markers:   special tokens of the vocabulary that this format needs as text.
    is_marked: a marker precedes each call, so a call of an unknown tool is a call too: the client tells the model.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    is_marked: ClassVar[bool] = True

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._events: list[Event] = []
        self._space = ""
        self._has_calls = False
        self._call: Call | None = None
        self._held = ""
        """Characters that are text if the answer ends here."""
        self._end_marker_part = ""
        """The same of a malformed call: they are arguments then."""
        self._character = self._unread = ""
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """Return what this further text completes."""
        for character in text:
            self._step(character)
            while unread := self._unread:
                self._unread = unread[1:]
                self._step(unread[0])
        return self._new_events()

    def finish(self) -> list[Event]:
        """Return the rest at the end of the answer."""
        if self._call is not None and self._call.begun:
            if self._call.in_arguments:
                self.arguments(self._end_marker_part)
        else:
            self._give(self._held)
        if not self._has_calls and self._space:
            self._events.append(Text(self._space))
        return self._new_events()

    def accepts(self, name: str) -> bool:
        return self.is_marked or name in self._names

    def begin(self, name: str) -> None:
        self._space = self._held = ""
        self._has_calls = True
        self._events.append(CallBegin(name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    @abstractmethod
    def _read(self) -> Reading:
        """Read the whole answer, one character at a time. Each character is in `_held` when it arrives."""

    def _step(self, character: str) -> None:
        self._character = character
        self._held = "" if self._call is not None and self._call.begun else self._held + character
        self._reading.send(character)

    def _give(self, text: str) -> None:
        """Give out text. White space around calls belongs to the format, so it waits for what follows."""
        pending = self._space + text
        body = pending.rstrip()
        self._space = pending[len(body) :]
        if body:
            self._events.append(Text(body))

    def _release(self) -> None:
        """Give out the held characters as text."""
        held, self._held = self._held, ""
        self._give(held)

    def _read_text(self) -> Reading:
        """Read the rest of the answer as text."""
        while True:
            self._release()
            yield

    def _read_until(self, marker: str) -> Reading:
        """Give out text up to a marker. Only the marker is held then."""
        while self._held != marker:
            yield
            while not marker.startswith(self._held):
                self._give(self._held[0])
                self._held = self._held[1:]

    def _read_call(self, first: str, *, name: str | None = None, end: str = "") -> Generator[None, str, bool]:
        """Read one call. Return False if the text is no call; it has been given out as text then.

        first: the character that begins the call.
        name:  of the function, if the text has only the arguments.
        end:   the marker after a call. A model may write malformed JSON in a call that has begun. The parser passes it
               on as arguments, up to the marker or the end of the answer: the client sees what the model wrote.
        """
        call = self._call = Call(self)
        try:
            yield from call.read_object(first) if name is None else call.read_arguments(name, first)
        except MalformedError:
            if not call.begun:
                self._call = None
                self._release()
                return False
            self._unread = self._character + self._unread
            while not end or self._end_marker_part != end:
                self._end_marker_part += yield
                while not end.startswith(self._end_marker_part):
                    if call.in_arguments:
                        self.arguments(self._end_marker_part[0])
                    self._end_marker_part = self._end_marker_part[1:]
            self._unread, self._end_marker_part = end + self._unread, ""
        self._call = None
        return True

    def _read_call_list(self) -> Reading:
        """Read the rest of `[call, call, …]` after the bracket. What is no call is given out as text."""
        separator = ","
        while separator == ",":
            first = yield from next_token()
            if not (yield from self._read_call(first)):
                return
            separator = yield from next_token()
        if separator == "]":
            self._held = ""
        self._release()

    def _new_events(self) -> list[Event]:
        """The events since the last call, adjacent ones of a kind joined."""
        joined: list[Event] = []
        for kind, group in groupby(self._events, key=type):
            events = list(group)
            texts = [event.text for event in events if not isinstance(event, CallBegin)]
            joined += [kind("".join(texts))] if texts else events
        self._events = []
        return joined


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` with text around it: Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def _read(self) -> Reading:
        while True:
            yield from self._read_until(self.OPEN)
            if not (yield from self._read_call((yield from next_token()), end=self.CLOSE)):
                continue
            # A model that omits the closing marker continues with text or with the next call.
            tail = self._held = ""
            while tail != self.CLOSE and self.CLOSE.startswith(tail):
                tail = (tail + (yield)).lstrip()
                self._held = ""
            if tail != self.CLOSE:
                self._unread = tail + self._unread


class Llama3JsonParser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, several with `;` between: Llama 3.

    An answer that begins with anything but an object that names a tool is text.
    """

    TAG = "<|python_tag|>"
    _SEPARATORS = frozenset(" \t\r\n;")
    markers: ClassVar[tuple[str, ...]] = (TAG,)
    is_marked: ClassVar[bool] = False

    def _read(self) -> Reading:
        is_call = True
        while is_call:
            before = ""  # the part of the tag that has been read, or the character that is no part of it
            while self.TAG.startswith(before):
                before += yield
                if before == self.TAG or before in self._SEPARATORS:
                    before = ""
                if self._has_calls:
                    self._held = "" if self.TAG.startswith(before) else before
            is_call = before == "{" and (yield from self._read_call(before))
        yield from self._read_text()


class MistralParser(ToolParser):
    """Text, then `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral."""

    MARKER = "[TOOL_CALLS]"
    markers: ClassVar[tuple[str, ...]] = (MARKER, "[ARGS]", "[CALL_ID]")
    _NAME = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
    _MAX_NAME_CHARACTERS = 160

    def _read(self) -> Reading:
        while True:
            yield from self._read_until(self.MARKER)
            before = ""
            while (character := (yield)) not in ("{", "\n") and len(before) < self._MAX_NAME_CHARACTERS:
                if character == "[" and not before.strip():
                    break
                before += character
            named = self._NAME.fullmatch(before)
            if character == "[" and not before.strip():
                yield from self._read_call_list()
            elif character == "{" and (named is not None or not before.strip()):
                yield from self._read_call(character, name=named and named[1])
            else:
                self._release()


class PythonicParser(ToolParser):
    """`[name(argument="value"), …]` as the whole answer, a Python list of calls with literal arguments: Llama 4.

    An answer that does not begin with `[name(` of a tool is text. Each call is given out when it is complete.
    """

    is_marked: ClassVar[bool] = False
    MAX_CALL_CHARACTERS = 256 * 1024
    MAX_DEPTH = 64

    def _read(self) -> Reading:
        while (character := (yield)).isspace():
            pass
        if character == "[":
            yield from self._read_list()
        yield from self._read_text()

    def _read_list(self) -> Reading:
        """Read up to the end of the list, or to where the text cannot be a list of calls."""
        call, depth, quote = "", 0, ""
        while 0 <= depth <= self.MAX_DEPTH and len(self._held) <= self.MAX_CALL_CHARACTERS:
            character = yield
            if quote:
                if character == "\\":
                    call += character
                    character = yield
                elif character == quote:
                    quote = ""
            elif depth == 0 and character in ",]":
                is_trailing_comma = not call.strip() and self._has_calls and character == "]"
                if not is_trailing_comma:
                    if (read := _python_call(call)) is None:
                        return
                    self.begin(read[0])
                    self.arguments(read[1])
                call = self._held = ""
                if character == "]":
                    return
                continue
            elif character in "'\"":
                quote = character
            elif character in "([{":
                if character == "(" and depth == 0 and not self.accepts(call.strip()):
                    return
                depth += 1
            elif character in ")]}":
                depth -= 1
            call += character


class RequiredParser(ToolParser):
    """`tool_choice: required`: a grammar makes the whole answer a list of calls."""

    def _read(self) -> Reading:
        if (yield from next_token()) == "[":
            yield from self._read_call_list()
        yield from self._read_text()


class NamedParser(ToolParser):
    """`tool_choice` names the one tool: a grammar makes the whole answer its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__([name])

    def _read(self) -> Reading:
        yield from self._read_call((yield from next_token()), name=self._name)
        yield from self._read_text()


def _python_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a call whose arguments are literals given by keyword; else None."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        arguments: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        return ast.unparse(tree.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_FORMATS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""Text of a chat template and the format that it teaches; the first match counts."""

_INSTRUCTIONS = (
    "You can call these functions, given as JSON between <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and its arguments as one JSON object between {HermesParser.OPEN}{HermesParser.CLOSE}:"
    f'\n{HermesParser.OPEN}\n{{{{"name": "function-name", "arguments": {{{{"argument": "value"}}}}}}}}\n'
    f"{HermesParser.CLOSE}"
)


def parser_of(template: str | None) -> type[ToolParser]:
    """Return the parser for the calls that a chat template asks for; Hermes' if it does not mention calls."""
    return PARSERS[next((name for text, name in _FORMATS if text in (template or "")), "hermes")]


def without_tool_roles(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return a conversation for a chat template that knows no tools: Hermes' format, written as text.

    The system message describes the tools; calls and results become text. Only the roles system, user and assistant
    remain.
    """
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{HermesParser.OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HermesParser.CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    return {**kept, "content": "\n".join([kept["content"], *calls] if kept["content"] else calls or [""])}
