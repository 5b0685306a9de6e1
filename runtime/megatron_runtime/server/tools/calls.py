"""Tool calls written as JSON, `{"name": …, "arguments": {…}}`, alone or in a list, character by character."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_runtime.server.tools.json_scan import JsonScanner, Verdict

_SPACE = " \t\n\r"
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type", "index"})


@dataclass(frozen=True, slots=True)
class CallSink:
    """Where calls go as they are read.

    accepts:   whether a name can be called at all; a call of another name is invalid.
    begin:     a call of this name has begun.
    arguments: the next piece of its arguments, which together are the JSON object that the model wrote.
    """

    accepts: Callable[[str], bool]
    begin: Callable[[str], None]
    arguments: Callable[[str], None]


class Reader(Protocol):
    """Reads one construct; `begun` says that a call is under way at the sink, which cannot be taken back."""

    begun: bool

    def feed(self, character: str) -> Verdict: ...

    def after_error(self, character: str) -> None:
        """Take the invalid character and all that follow it, where a call was under way."""


class CallObject:
    """One call, its keys in any order. The call begins as soon as its name and the start of its arguments are known."""

    def __init__(self, sink: CallSink) -> None:
        self.begun = False
        self._sink = sink
        self._expects = "open"
        self._value = JsonScanner()
        self._key = ""
        self._raw = ""
        self._name: str | None = None
        self._arguments = ""  # read, but not given out yet
        self._has_arguments = False

    def feed(self, character: str) -> Verdict:
        match self._expects:
            case "value":
                return self._in_value(character)
            case "key":
                return self._in_key(character)
        if character in _SPACE:
            return Verdict.MORE
        if self._expects == "open":
            return self._then("first_key") if character == "{" else Verdict.INVALID
        if self._expects == "colon":
            return self._start("value") if character == ":" else Verdict.INVALID
        if character == "}" and self._expects in ("first_key", "after"):
            return self._end()
        if character == "," and self._expects == "after":
            return self._then("next_key")
        if character == '"' and self._expects in ("first_key", "next_key"):
            self._start("key")
            return self._in_key(character)
        return Verdict.INVALID

    def after_error(self, character: str) -> None:
        if self._expects == "value" and self._key in _ARGUMENT_KEYS:
            self._sink.arguments(character)

    def _in_key(self, character: str) -> Verdict:
        verdict = self._value.feed(character)
        self._raw += character
        if verdict is Verdict.DONE:
            self._key = json.loads(self._raw)
            # Before a call has begun, an unknown key says that this is some other object.
            is_known = self.begun or self._key in _ARGUMENT_KEYS | _OTHER_KEYS | {"name"}
            is_repeated = self._key in _ARGUMENT_KEYS and self._has_arguments
            return self._then("colon") if is_known and not is_repeated else Verdict.INVALID
        return verdict

    def _in_value(self, character: str) -> Verdict:
        verdict = self._value.feed(character)
        if verdict is Verdict.INVALID:
            return verdict
        if verdict is not Verdict.BEFORE:
            self._raw += character
            if self._key in _ARGUMENT_KEYS and not self._take_argument(character):
                return Verdict.INVALID
        if verdict is Verdict.MORE:
            return verdict
        self._expects = "after"
        if self._key == "name" and not self._take_name():
            return Verdict.INVALID
        if self._key in _ARGUMENT_KEYS and not self._take_whole_arguments():
            return Verdict.INVALID
        return self.feed(character) if verdict is Verdict.BEFORE else Verdict.MORE

    def _take_name(self) -> bool:
        name = json.loads(self._raw)
        if not isinstance(name, str) or not name or self._name is not None or not self._sink.accepts(name):
            return False
        self._name = name
        self._give()
        return True

    def _take_argument(self, character: str) -> bool:
        """Pass an object on as it comes; a string, which may hold the object, is looked at when it is whole."""
        start = self._raw.lstrip()[:1]
        if start == "{":
            self._has_arguments = True
            self._arguments += character if self._arguments or self.begun or character not in _SPACE else ""
            self._give()
        return start in ("", "{", '"')

    def _take_whole_arguments(self) -> bool:
        if self._has_arguments:
            return True
        try:
            inner = json.loads(self._raw)
            is_object = isinstance(inner, str) and isinstance(json.loads(inner or "{}"), dict)
        except ValueError:
            return False
        if is_object:
            self._has_arguments = True
            self._arguments = inner or "{}"
            self._give()
        return is_object

    def _give(self) -> None:
        if self._name is None or not self._has_arguments:
            return
        if not self.begun:
            self.begun = True
            self._sink.begin(self._name)
        self._sink.arguments(self._arguments)
        self._arguments = ""

    def _end(self) -> Verdict:
        if self._name is None:
            return Verdict.INVALID
        if not self._has_arguments:
            self._has_arguments, self._arguments = True, "{}"
            self._give()
        return Verdict.DONE

    def _start(self, expects: str) -> Verdict:
        self._value, self._raw = JsonScanner(), ""
        return self._then(expects)

    def _then(self, expects: str) -> Verdict:
        self._expects = expects
        return Verdict.MORE


class CallList:
    """`[call, call, …]`."""

    def __init__(self, sink: CallSink) -> None:
        self.begun = False
        self._sink = sink
        self._expects = "open"
        self._call: CallObject | None = None

    def feed(self, character: str) -> Verdict:
        if self._call is not None:
            return self._in_call(self._call, character)
        self.begun = False
        if character in _SPACE:
            return Verdict.MORE
        if self._expects == "open":
            self._expects = "first"
            return Verdict.MORE if character == "[" else Verdict.INVALID
        if self._expects == "after":
            self._expects = "next"
            return {",": Verdict.MORE, "]": Verdict.DONE}.get(character, Verdict.INVALID)
        self._call = CallObject(self._sink)
        return self._in_call(self._call, character)

    def after_error(self, character: str) -> None:
        if self._call is not None:
            self._call.after_error(character)

    def _in_call(self, call: CallObject, character: str) -> Verdict:
        verdict = call.feed(character)
        self.begun = call.begun
        if verdict is Verdict.DONE:
            self._call, self._expects = None, "after"
            return Verdict.MORE
        return verdict


class RawArguments:
    """The arguments alone, of a call whose name stood before them."""

    def __init__(self, sink: CallSink, name: str) -> None:
        self.begun = False
        self._sink = sink
        self._name = name
        self._value = JsonScanner()

    def feed(self, character: str) -> Verdict:
        if not self.begun:
            if character in _SPACE:
                return Verdict.MORE
            if character != "{" or not self._sink.accepts(self._name):
                return Verdict.INVALID
            self.begun = True
            self._sink.begin(self._name)
        verdict = self._value.feed(character)
        if verdict is not Verdict.INVALID:
            self._sink.arguments(character)
        return verdict

    def after_error(self, character: str) -> None:
        self._sink.arguments(character)
