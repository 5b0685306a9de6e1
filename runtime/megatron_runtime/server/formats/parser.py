"""`ToolParser`, the base class of the parsers for tool calls, and the events that parsers return.

A parser reads the answer in parts of any size, and returns text and tool calls. The result does not depend on how the
answer is split. The methods that read a construct are generators. Such a method yields when it needs more text, returns
at the end of its construct (such as a tool call), and raises MalformedError for text that cannot continue the
construct. A parser can therefore stream arguments while the model writes them.

The cost is linear in the length of the answer. Before a generator yields, it consumes all text except a remainder of
bounded length. It reads only this remainder again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.formats.head import Head

MAX_JSON_DEPTH = 256
MAX_NAME_CHARACTERS = 256
"""Maximum length of a function's name. The names in a conversation have the same limit."""

_SPACE = re.compile(r"[ \t\n\r]*")
_TOKEN = re.compile(r'[\[\]{}:,"]|[-+.\w]{0,400}', re.ASCII)
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_ESCAPE_BEGIN = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_PUNCTUATION = frozenset('[]{}:,"')
_CLOSER = {"{": "}", "[": "]"}
_NAME_KEYS = frozenset({"name", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type", "index", "tool_call_id"})

Reading = Generator[None, None, None]
StringReading = Generator[None, None, str]


@dataclass(frozen=True, slots=True)
class Text:
    """An event with a part of the answer's text that is not part of a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """An event with a part of the model's reasoning, which precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """An event for the beginning of a tool call. Each tool call has exactly one such event, before its arguments.

    id: id that the model assigned to the tool call; None: the model assigned no id.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """An event with the next part of the most recent tool call's arguments."""

    text: str


Event = Text | Reasoning | CallBegin | CallArguments


class MalformedError(ValueError):
    """The text at the current position cannot continue the construct that is being read."""


class ToolParser(ABC):
    """Parses the answer of one choice.

    tools:     JSON schema of the arguments of each tool in the request, by tool name.
    is_marked: whether a marker precedes each tool call. If so, the parser also returns calls of unknown tools, and the
               client can report the error to the model.
    """

    is_marked: ClassVar[bool] = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._events: list[Event] = []
        self._spaces: list[str] = []  # white space at the end of the emitted text, which is held back
        self._num_calls = 0
        self._in_call = False
        self._held: list[str] = []  # consumed text before the buffer that is not emitted yet
        self._buffer = ""
        self._start = 0  # start of the text in the buffer that is not emitted yet
        self._at = 0  # end of the consumed text in the buffer
        self._kind: type[Text | Reasoning | CallArguments] | None = None
        """Type of the events for consumed text; None: not known yet."""
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes."""
        self._hold()
        self._buffer = self._buffer[self._at :] + text
        self._start = self._at = 0
        next(self._reading)
        if self._kind is not None:
            self._flush()
        return self._new_events()

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events."""
        self._at = len(self._buffer)
        if not self._in_call:
            self._kind = Text
        self._flush()
        if not self._num_calls and self._spaces:
            self._events.append(Text("".join(self._spaces)))
        return self._new_events()

    @abstractmethod
    def _read(self) -> Reading:
        """Read the answer until the parser is dropped. This generator never ends."""

    def _new_events(self) -> list[Event]:
        """Return the events since the last call of this method. Adjacent events of the same type are joined."""
        joined: list[Event] = []
        for kind, group in groupby(self._events, key=type):
            events = list(group)
            texts = [event.text for event in events if not isinstance(event, CallBegin)]
            joined += [kind("".join(texts))] if texts else events
        self._events = []
        return joined

    def _flush(self) -> None:
        """Emit the consumed text as an event of the current type. If there is no current type, drop the text."""
        read = self._take_read()
        if self._kind is Text:
            # Trailing white space is held back, because white space around calls belongs to the format.
            body = read.rstrip()
            if body:
                self._events.append(Text("".join([*self._spaces, body])))
                self._spaces.clear()
            if len(body) < len(read):
                self._spaces.append(read[len(body) :])
        elif self._kind is not None and read:
            self._events.append(self._kind(read))

    def _hold(self) -> None:
        """Append the consumed text that has not been emitted to `_held`, so that the buffer no longer needs it."""
        if self._start < self._at:
            self._held.append(self._buffer[self._start : self._at])
            self._start = self._at

    def _take_read(self) -> str:
        """Return the consumed text that has not been emitted, and drop it."""
        self._hold()
        read = "".join(self._held)
        self._held.clear()
        return read

    def _begin(self, name: str, arguments: str = "") -> None:
        """Drop the consumed text, and emit the beginning of a tool call.

        arguments: text of the arguments, if it is already known.
        """
        self._flush()
        self._spaces.clear()
        self._num_calls += 1
        self._in_call = True
        self._events.append(CallBegin(name))
        if arguments:
            self._events.append(CallArguments(arguments))

    def _accepts(self, name: str) -> bool:
        is_name = 0 < len(name) <= MAX_NAME_CHARACTERS and is_unicode(name)
        return is_name and (self.is_marked or name in self._tools)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        """Consume the text that matches the pattern, if there is a match."""
        if (match := pattern.match(self._buffer, self._at)) is not None:
            self._at = match.end()

    def _read_space(self, pattern: re.Pattern[str], *, marker: str) -> Reading:
        """Consume the white space that matches the pattern. Stop at text that can be the beginning of the marker."""
        while True:
            self._skip(pattern)
            following = self._buffer[self._at : self._at + len(marker)]
            if following == marker or not marker.startswith(following):
                return
            yield

    def _read_end(self, marker: str) -> Generator[None, None, bool]:
        """Read white space, and then the marker if it follows. Return whether the marker was read."""
        yield from self._read_space(_SPACE, marker=marker)
        follows = self._buffer.startswith(marker, self._at)
        self._at += len(marker) if follows else 0
        return follows

    def _read_until(self, *markers: str) -> StringReading:
        """Read and emit the text before the first marker. Return the marker without consuming it.

        If no marker follows, read to the end of the answer.
        """
        while (match := first_of(self._buffer, markers, start=self._at)) is None:
            self._read_but(*markers)
            self._flush()
            yield
        self._at, marker = match
        self._flush()
        self._kind = None
        return marker

    def _read_but(self, *markers: str) -> None:
        """Consume the buffer except a suffix that can be the beginning of a marker."""
        kept = (overlap(self._buffer, marker, start=self._at) for marker in markers)
        self._at = len(self._buffer) - max(kept, default=0)

    def _read_head(self, *heads: Head) -> Generator[None, None, tuple[Head, re.Match[str]] | None]:
        """Return the first head that matches at this position, and the match. Return None if no head can match.

        Consumes no text.
        """
        while True:
            is_undecided = False
            for head in heads:
                if (match := head.pattern.match(self._buffer, self._at)) is not None and not is_undecided:
                    return head, match
                is_undecided = is_undecided or head.begin.fullmatch(self._buffer, self._at) is not None
            if not is_undecided:
                return None
            yield

    def _read_text(self, *markers: str) -> StringReading:
        """Emit the text before the first marker. Consume the marker without emitting it, and return the marker.

        Text that was consumed earlier but not emitted is emitted too.
        """
        self._kind = Text
        marker = yield from self._read_until(*markers)
        self._at += len(marker)
        return marker

    def _read_call(
        self, *, name: str | None = None, until: str = "", is_keyed: bool = False
    ) -> Generator[None, None, bool]:
        """Read one tool call, and return True.

        If the text is not a tool call, return False. The text that was read is then consumed but not emitted.

        name:     name of the function, if the text contains only the arguments.
        is_keyed: whether the tool call has the form `{name: {…}}`.
        until:    marker after the tool call; empty: the end of the answer. If the tool call has begun and its JSON is
                  malformed, the text up to `until` is emitted as arguments, so that the client sees what the model
                  wrote. If the arguments were already complete, the text up to `until` is emitted as text.
        """
        try:
            first = yield from self._token()
            _expect(first == "{")
            if is_keyed:
                yield from self._read_keyed()
            elif name is None:
                yield from self._read_members()
            else:
                yield from self._stream_arguments(name)
        except (ValueError, RecursionError):
            if not self._in_call:
                return False
            if self._kind is None:  # the arguments are complete, so the malformed rest becomes text
                self._in_call = False
                self._kind = Text
            yield from self._read_until(*((until,) if until else ()))
        self._flush()
        self._in_call = False
        return True

    def _read_call_list(self, *, until: str = "", is_keyed: bool = False) -> Generator[None, None, bool]:
        """Read a list of tool calls `[call, call, …]` after its opening bracket.

        Return whether the list ends correctly. If not, the text after the last tool call is consumed but not emitted.

        until, is_keyed: as for _read_call().
        """
        while (yield from self._read_call(until=until, is_keyed=is_keyed)):
            separator = yield from self._token()
            if separator == "]":
                self._flush()
                return True
            if separator != ",":
                break
        return False

    def _read_keyed(self) -> Reading:
        """Read the rest of `{name: {…}}` after the opening brace."""
        _expect((yield from self._token()) == '"')
        name = json.loads((yield from self._raw('"')))
        _expect(self._accepts(name) and (yield from self._token()) == ":")
        _expect((yield from self._token()) == "{")
        yield from self._stream_arguments(name)
        _expect((yield from self._token()) == "}")

    def _read_members(self) -> Reading:
        """Read the rest of `{"name": …, "arguments": {…}}` after the opening brace. The keys can be in any order."""
        name: str | None = None
        arguments: str | None = None
        token = yield from self._token()
        while token != "}":
            _expect(token == '"')
            key = json.loads((yield from self._raw(token)))
            # An unknown key shows that the object is no call. After the arguments, the rest of the object is emitted as
            # text.
            _expect(key in _ARGUMENT_KEYS or key in _NAME_KEYS or key in _OTHER_KEYS)
            _expect((yield from self._token()) == ":")
            token = yield from self._token()
            if key in _ARGUMENT_KEYS and name is not None and token == "{":
                _expect(arguments is None)
                yield from self._stream_arguments(name)
                arguments = ""
            else:
                raw = yield from self._raw(token)
                if key in _ARGUMENT_KEYS:
                    _expect(arguments is None)
                    # Some models write a string that contains the object.
                    arguments = raw if token == "{" else json.loads(raw) or "{}"
                    _expect(isinstance(arguments, str) and isinstance(json.loads(arguments), dict))
                    _expect(is_unicode(arguments))
                elif key in _NAME_KEYS:
                    _expect(name is None)
                    name = json.loads(raw)
                    _expect(isinstance(name, str) and self._accepts(name))
                if name is not None and arguments is not None and not self._in_call:
                    self._begin(name, arguments)
            token = yield from self._token()
            if token == ",":
                token = yield from self._token()
                _expect(token == '"')
            else:
                _expect(token == "}")
        _expect(name is not None)
        if name is not None and arguments is None:
            self._begin(name, "{}")

    def _stream_arguments(self, name: str) -> Reading:
        """Read a JSON object whose opening brace has been read. Emit its text as arguments while reading it."""
        self._begin(name)
        self._held.append("{")
        self._kind = CallArguments
        yield from self._value("{")
        self._flush()
        self._kind = None

    def _raw(self, token: str) -> StringReading:
        """Read one JSON value and return its text without emitting it. token: as for _value()."""
        self._at -= len(token)
        self._hold()
        begin = len(self._held)
        self._at += len(token)
        yield from self._value(token)
        self._hold()
        return "".join(self._held[begin:])

    def _value(self, token: str, *, depth: int = 0) -> Reading:
        """Read one JSON value. token: first token of the value, which has been read."""
        if token == '"':
            yield from self._string()
            return
        if token not in _CLOSER:
            _expect(_SCALAR.fullmatch(token) is not None)
            return
        _expect(depth < MAX_JSON_DEPTH)
        closer = _CLOSER[token]
        token = yield from self._token()
        while token != closer:
            if closer == "}":
                _expect(token == '"')
                yield from self._string()
                _expect((yield from self._token()) == ":")
                token = yield from self._token()
            yield from self._value(token, depth=depth + 1)
            token = yield from self._token()
            if token == ",":
                token = yield from self._token()
                _expect(token != closer)
            else:
                _expect(token == closer)

    def _token(self) -> StringReading:
        """Read and return a bracket, `:`, `,`, `"`, a number or a JSON literal. Return "" for any other character."""
        while True:
            self._skip(_SPACE)
            begin = self._at
            self._skip(_TOKEN)
            token = self._buffer[begin : self._at]
            if token in _PUNCTUATION or self._at < len(self._buffer):
                return token
            self._at = begin  # more characters of the token may follow
            yield

    def _string(self) -> Reading:
        """Read a string whose opening quote has been read."""
        while True:
            self._skip(_STRING)
            if self._buffer.startswith('"', self._at):
                self._at += 1
                return
            _expect(_ESCAPE_BEGIN.fullmatch(self._buffer, self._at) is not None)
            yield


class RequiredParser(ToolParser):
    """Parses answers if `tool_choice` is `required`, so that a grammar restricts the answer to a list of tool calls."""

    def _read(self) -> Reading:
        if (yield from self._token()) == "[":
            yield from self._read_call_list()
        yield from self._read_text()


class NamedParser(ToolParser):
    """Parses answers if `tool_choice` names a tool, so that a grammar restricts the answer to the tool's arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__({name: {}})

    def _read(self) -> Reading:
        yield from self._read_call(name=self._name)
        yield from self._read_text()


class CallsOrTextParser:
    """Parses answers that are either tool calls or text, and not text with tool calls.

    A marker of tool calls in the text, such as in a string of JSON, has therefore no effect.

    calls:  parser for tool calls.
    starts: texts with which tool calls begin; empty: `calls` itself distinguishes them from text.
    """

    def __init__(self, calls: ToolParser, starts: Sequence[str]) -> None:
        self._calls: ToolParser | None = calls
        self._starts = tuple(starts)
        self._is_decided = not starts
        self._begin = ""

    def feed(self, text: str) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes."""
        if not self._is_decided:
            self._begin += text
            begin = self._begin.lstrip()
            if not begin.startswith(self._starts):
                if any(start.startswith(begin) for start in self._starts):
                    return []
                self._calls = None
            self._is_decided = True
            text, self._begin = self._begin, ""
        if self._calls is not None:
            return self._calls.feed(text)
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events."""
        if not self._is_decided:
            return [Text(self._begin)] if self._begin else []
        return [] if self._calls is None else self._calls.finish()


def first_of(text: str, markers: Sequence[str], *, start: int = 0) -> tuple[int, str] | None:
    """Return the lowest index from `start` on at which `text` has a marker, and the longest marker at this index.

    Return None if the text contains no marker.
    """
    places = ((place, -len(marker), marker) for marker in markers if (place := text.find(marker, start)) >= 0)
    first = min(places, default=None)
    return None if first is None else (first[0], first[2])


def overlap(text: str, marker: str, *, start: int = 0) -> int:
    """Return the length of the longest suffix of `text[start:]` that is a proper prefix of `marker`."""
    longest = min(len(text) - start, len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def is_unicode(text: str) -> bool:
    """Return whether a text contains no lone surrogates, which JSON escapes can produce and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect(condition: bool) -> None:
    if not condition:
        raise MalformedError
