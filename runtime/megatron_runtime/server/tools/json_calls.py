"""Follow tool calls in JSON character by character, as a model writes them.

Each reader is a generator: `send()` gives it the next character, it returns at the end of its construct, and it raises
MalformedError for a character that cannot continue the construct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Protocol

MAX_DEPTH = 256

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


class MalformedError(ValueError):
    """The last character cannot continue what is being read."""


class CallSink(Protocol):
    """Receives calls while they are read."""

    def accepts(self, name: str) -> bool:
        """Whether `name` can be called at all; a call of another name is malformed."""

    def begin(self, name: str) -> None:
        """A call of this name begins."""

    def arguments(self, text: str) -> None:
        """The next part of its arguments. Together the parts are the JSON object that the model wrote."""


class Call:
    """One call that is being read. It begins at the sink when its name and the start of its arguments are known."""

    def __init__(self, sink: CallSink) -> None:
        self.begun = False
        self.in_arguments = False
        """Whether the reader is in the value of the arguments."""
        self._sink = sink
        self._name: str | None = None
        self._has_arguments = False
        self._unsent = ""

    def read_object(self, character: str) -> Reading:
        """Read `{"name": …, "arguments": {…}}` with its keys in any order.

        character: the first of the object.
        """
        _expect(character == "{")
        character = yield from next_token()
        if character != "}":
            character = yield from self._read_members(character)
        _expect(self._name is not None)
        if not self._has_arguments:
            self._take_arguments("{}")

    def read_arguments(self, name: str, character: str) -> Reading:
        """Read the arguments of a call whose name the caller knows.

        character: the first of the arguments.
        """
        _expect(character == "{" and self._sink.accepts(name))
        self._name, self.in_arguments = name, True
        yield from json_value(character, self._take_arguments)

    def _read_members(self, character: str) -> CharacterReading:
        while True:
            _expect(character == '"')
            raw: list[str] = []
            yield from _string(raw.append)
            key = json.loads("".join(raw))
            # Before a call has begun, an unknown key shows that this is another kind of object.
            _expect(self.begun or key in _ARGUMENT_KEYS or key in _OTHER_KEYS)
            _expect(key not in _ARGUMENT_KEYS or not self._has_arguments)
            _expect((yield from next_token()) == ":")
            self.in_arguments = key in _ARGUMENT_KEYS
            character = yield from next_token()
            if self.in_arguments:
                following = yield from self._read_argument_value(character)
            else:
                raw = []
                following = yield from json_value(character, raw.append)
                if key == "name":
                    self._take_name(json.loads("".join(raw)))
            self.in_arguments = False
            character = yield from next_token(first=following)
            if character == "}":
                return character
            _expect(character == ",")
            character = yield from next_token()

    def _read_argument_value(self, character: str) -> CharacterReading:
        """Pass an object on while it is written; a string, which may contain the object, when it is complete."""
        if character == "{":
            return (yield from json_value(character, self._take_arguments))
        _expect(character == '"')
        raw: list[str] = []
        yield from _string(raw.append)
        inner = json.loads("".join(raw)) or "{}"
        try:
            _expect(isinstance(json.loads(inner), dict))
        except ValueError as error:
            raise MalformedError from error
        self._take_arguments(inner)
        return ""

    def _take_name(self, name: object) -> None:
        _expect(isinstance(name, str) and name != "" and self._name is None and self._sink.accepts(name))
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
            self._sink.begin(self._name)
        self._sink.arguments(self._unsent)
        self._unsent = ""


def json_value(character: str, take: Take) -> CharacterReading:
    """Read one JSON value.

    character: the first of the value.
    take:      called with each character of the value.
    Returns the character that ended a number or literal and is not part of it, "" after every other value.
    """
    closers: list[str] = []
    while True:
        following = ""
        if character == '"':
            yield from _string(take)
        elif character in _CLOSER and len(closers) < MAX_DEPTH:
            take(character)
            closers.append(_CLOSER[character])
            character = yield from next_token(take)
            if character != closers[-1]:
                character = yield from _member(character, take, inside=closers[-1])
                continue
            take(character)
            closers.pop()
        else:
            following = yield from _scalar(character, take)
        while closers:
            character = yield from next_token(take, first=following)
            following = ""
            if character == ",":
                take(character)
                character = yield from _member((yield from next_token(take)), take, inside=closers[-1])
                break
            _expect(character == closers.pop())
            take(character)
        else:
            return following


def next_token(take: Take = lambda _: None, *, first: str = "") -> CharacterReading:
    """Return the next character that is not white space. take: called with the white space."""
    character = first or (yield)
    while character in _SPACE:
        take(character)
        character = yield
    return character


def _member(character: str, take: Take, *, inside: str) -> CharacterReading:
    """Read up to the first character of the next value: past the key and the colon in an object."""
    if inside == "]":
        return character
    _expect(character == '"')
    yield from _string(take)
    _expect((yield from next_token(take)) == ":")
    take(":")
    return (yield from next_token(take))


def _string(take: Take) -> Reading:
    """Read a string whose opening quote has been read, and not taken."""
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
