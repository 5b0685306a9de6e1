"""Tool calls: how models write them, parsers of their answers, and a description of tools for models without a format.

A parser takes the text in parts of any size and returns text and calls; how the text is divided does not change the
result. JSON is read by generators, character by character, so that arguments are streamed while the model writes them:
`send()` gives a reader the next character, the reader returns at the end of its construct, and it raises
MalformedError for a character that cannot continue the construct.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

MAX_JSON_DEPTH = 256

_SPACE = " \t\n\r"
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SCALAR_START = frozenset("-0123456789tfn")
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_MAX_SCALAR = 400
_ESCAPES = frozenset('"\\/bfnrt')
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSER = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"name", "id", "type", "index"})

Reading = Generator[None, str, None]
CharacterReading = Generator[None, str, str]
Take = Callable[[str], None]


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


class MalformedError(ValueError):
    """The last character cannot continue what is being read."""


class ToolParser(ABC):
    """Parses the answer of one choice.

    names:     the tools of the request.
    markers:   special tokens of the vocabulary that this format needs as text.
    is_marked: a marker precedes each call. A call of an unknown tool is then a call too, and the client reports the
               error to the model.
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
        """Characters of a malformed call that are arguments if the answer ends here."""
        self._character = self._unread = ""
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """Return the events that the next part of the answer completes."""
        for character in text:
            self._step(character)
            while unread := self._unread:
                self._unread = unread[1:]
                self._step(unread[0])
        return self._new_events()

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""
        if self._call is not None and self._call.begun:
            if self._call.in_arguments:
                self.arguments(self._end_marker_part)
        else:
            self._emit_text(self._held)
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
        """Read the whole answer, one character at a time. Each character has been added to `_held` when it arrives."""

    def _step(self, character: str) -> None:
        self._character = character
        self._held = "" if self._call is not None and self._call.begun else self._held + character
        self._reading.send(character)

    def _emit_text(self, text: str) -> None:
        """Emit text without its trailing white space, which is held: around calls it is part of the format."""
        pending = self._space + text
        body = pending.rstrip()
        self._space = pending[len(body) :]
        if body:
            self._events.append(Text(body))

    def _emit_held(self) -> None:
        """Emit the held characters as text."""
        held, self._held = self._held, ""
        self._emit_text(held)

    def _read_text(self) -> Reading:
        """Read the rest of the answer as text."""
        while True:
            self._emit_held()
            yield

    def _read_until(self, marker: str) -> Reading:
        """Emit the text before a marker and hold the marker."""
        while self._held != marker:
            yield
            while not marker.startswith(self._held):
                self._emit_text(self._held[0])
                self._held = self._held[1:]

    def _read_call(self, first: str, *, name: str | None = None, end: str = "") -> Generator[None, str, bool]:
        """Read one call. Return False, with the text emitted as text, if it is not a call.

        first: the character that begins the call.
        name:  of the function, if the text has only the arguments.
        end:   the marker after a call. If the JSON of a call that has begun is malformed, its text up to the marker, or
               up to the end of the answer, is passed on as arguments: the client sees what the model wrote.
        """
        call = self._call = Call(self)
        try:
            yield from call.read_object(first) if name is None else call.read_arguments(name, first)
        except MalformedError:
            if not call.begun:
                self._call = None
                self._emit_held()
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
        """Read the rest of `[call, call, …]` after the bracket. Anything but a call is emitted as text."""
        separator = ","
        while separator == ",":
            first = yield from next_token()
            if not (yield from self._read_call(first)):
                return
            separator = yield from next_token()
        if separator == "]":
            self._held = ""
        self._emit_held()

    def _new_events(self) -> list[Event]:
        """Return the collected events, with adjacent ones of the same type joined."""
        joined: list[Event] = []
        for kind, group in groupby(self._events, key=type):
            events = list(group)
            texts = [event.text for event in events if not isinstance(event, CallBegin)]
            joined += [kind("".join(texts))] if texts else events
        self._events = []
        return joined


class Call:
    """One call that is being read. It begins at the parser when its name and the start of its arguments are known.

    begun:        the parser has been notified of the call.
    in_arguments: the reader is in the value of the arguments.
    """

    def __init__(self, parser: ToolParser) -> None:
        self.begun = False
        self.in_arguments = False
        self._parser = parser
        self._name: str | None = None
        self._has_arguments = False
        self._unsent = ""

    def read_object(self, character: str) -> Reading:
        """Read `{"name": …, "arguments": {…}}` with its keys in any order. character: the first of the object."""
        _expect(character == "{")
        character = yield from next_token()
        if character != "}":
            yield from self._read_members(character)
        _expect(self._name is not None)
        if not self._has_arguments:
            self._take_arguments("{}")

    def read_arguments(self, name: str, character: str) -> Reading:
        """Read the arguments of a call of a known name. character: the first of the arguments."""
        _expect(character == "{" and self._parser.accepts(name))
        self._name, self.in_arguments = name, True
        yield from json_value(character, self._take_arguments)

    def _read_members(self, character: str) -> Reading:
        while True:
            _expect(character == '"')
            key = yield from _string_value()
            # Before a call has begun, an unknown key shows that this is another kind of object.
            _expect(self.begun or key in _ARGUMENT_KEYS or key in _OTHER_KEYS)
            _expect(key not in _ARGUMENT_KEYS or not self._has_arguments)
            _expect((yield from next_token()) == ":")
            self.in_arguments = key in _ARGUMENT_KEYS
            character = yield from next_token()
            if self.in_arguments:
                following = yield from self._read_argument_value(character)
            else:
                raw: list[str] = []
                following = yield from json_value(character, raw.append)
                if key == "name":
                    self._take_name(json.loads("".join(raw)))
            self.in_arguments = False
            character = yield from next_token(first=following)
            if character == "}":
                return
            _expect(character == ",")
            character = yield from next_token()

    def _read_argument_value(self, character: str) -> CharacterReading:
        """Pass on an object character by character, and a string that contains the object when it is complete."""
        if character == "{":
            return (yield from json_value(character, self._take_arguments))
        _expect(character == '"')
        inner = (yield from _string_value()) or "{}"
        try:
            _expect(isinstance(json.loads(inner), dict))
        except ValueError as error:
            raise MalformedError from error
        self._take_arguments(inner)
        return ""

    def _take_name(self, name: object) -> None:
        _expect(isinstance(name, str) and name != "" and self._name is None and self._parser.accepts(name))
        self._name = str(name)
        if self._has_arguments:
            self._take_arguments("")

    def _take_arguments(self, text: str) -> None:
        self._has_arguments = True
        self._unsent += text
        if self._name is None:
            return
        if not self.begun:
            self.begun = True
            self._parser.begin(self._name)
        self._parser.arguments(self._unsent)
        self._unsent = ""


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

    An answer that does not begin with an object that names a tool is text.
    """

    TAG = "<|python_tag|>"
    _SEPARATORS = frozenset(" \t\r\n;")
    markers: ClassVar[tuple[str, ...]] = (TAG,)
    is_marked: ClassVar[bool] = False

    def _read(self) -> Reading:
        is_call = True
        while is_call:
            before = ""  # the beginning of the tag that has been read, or another character
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
                self._emit_held()


class PythonicParser(ToolParser):
    """`[name(argument="value"), …]` as the whole answer, a Python list of calls with literal arguments: Llama 4.

    An answer that does not begin with `[name(` of a tool is text. Each call is emitted when it is complete.
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
        """Read up to the end of the list, or to the first character that a list of calls cannot have."""
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
    """`tool_choice: required`: a grammar restricts the answer to a list of calls."""

    def _read(self) -> Reading:
        if (yield from next_token()) == "[":
            yield from self._read_call_list()
        yield from self._read_text()


class NamedParser(ToolParser):
    """`tool_choice` names one tool: a grammar restricts the answer to its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__([name])

    def _read(self) -> Reading:
        yield from self._read_call((yield from next_token()), name=self._name)
        yield from self._read_text()


def _python_call(text: str) -> tuple[str, str] | None:
    """Return name and JSON arguments of a call; None unless all its arguments are literals given by keyword."""
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
"""Text of a chat template, and the format that a template with this text describes. The first match counts."""

_INSTRUCTIONS = (
    "You can call these functions, given as JSON between <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and its arguments as one JSON object between {HermesParser.OPEN}{HermesParser.CLOSE}:"
    f'\n{HermesParser.OPEN}\n{{{{"name": "function-name", "arguments": {{{{"argument": "value"}}}}}}}}\n'
    f"{HermesParser.CLOSE}"
)


def parser_of(template: str | None) -> type[ToolParser]:
    """Return the parser of the format that a chat template describes; the Hermes parser if it describes none."""
    return PARSERS[next((name for text, name in _FORMATS if text in (template or "")), "hermes")]


def without_tool_roles(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return a conversation for a chat template without support for tools: the Hermes format, written as text.

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


def json_value(character: str, take: Take, *, depth: int = 0) -> CharacterReading:
    """Read one JSON value.

    character: the first of the value.
    take:      called with each character of the value.
    Returns the character that ended a number or literal and is not part of it, "" after every other value.
    """
    if character == '"':
        yield from _string(take)
        return ""
    if character not in _CLOSER:
        return (yield from _scalar(character, take))
    _expect(depth < MAX_JSON_DEPTH)
    closer = _CLOSER[character]
    take(character)
    character = yield from next_token(take)
    while character != closer:
        if closer == "}":
            _expect(character == '"')
            yield from _string(take)
            _expect((yield from next_token(take)) == ":")
            take(":")
            character = yield from next_token(take)
        following = yield from json_value(character, take, depth=depth + 1)
        character = yield from next_token(take, first=following)
        if character == ",":
            take(character)
            character = yield from next_token(take)
            _expect(character != closer)
        else:
            _expect(character == closer)
    take(character)
    return ""


def next_token(take: Take = lambda _: None, *, first: str = "") -> CharacterReading:
    """Return the next character that is not white space. take: called with the white space."""
    character = first or (yield)
    while character in _SPACE:
        take(character)
        character = yield
    return character


def _string_value() -> CharacterReading:
    """Return the value of a string whose opening quote has been read."""
    raw: list[str] = []
    yield from _string(raw.append)
    return str(json.loads("".join(raw)))


def _string(take: Take) -> Reading:
    """Read a string whose opening quote has been read but not passed to `take`."""
    take('"')
    while (character := (yield)) != '"':
        _expect(character >= " ")
        take(character)
        if character != "\\":
            continue
        character = yield
        _expect(character == "u" or character in _ESCAPES)
        take(character)
        for _ in range(4 if character == "u" else 0):
            digit = yield
            _expect(digit in _HEXADECIMAL)
            take(digit)
    take(character)


def _scalar(character: str, take: Take) -> CharacterReading:
    _expect(character in _SCALAR_START)
    text = ""
    while character in _SCALAR_CHARACTERS:
        _expect(len(text) < _MAX_SCALAR)
        text += character
        take(character)
        character = yield
    _expect(_SCALAR.fullmatch(text) is not None)
    return character


def _expect(condition: bool) -> None:
    if not condition:
        raise MalformedError
