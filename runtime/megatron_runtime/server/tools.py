"""Tool calls: how models write them, and parsers of their answers.

A parser takes the text in parts of any size and returns text and calls; how the text is divided does not change the
result. Generators read it: a reader yields when it needs more text, returns at the end of its construct, and raises
MalformedError for text that cannot continue the construct. So arguments are streamed while the model writes them.

The cost is linear in the answer: before a reader yields, it reads all text but a bounded rest, which it sees again.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server import call_grammars
from megatron_runtime.server.call_grammars import CallGrammar, Schemas, Written

MAX_JSON_DEPTH = 256
MAX_NAME_CHARACTERS = 256
"""Of a function: a conversation may have no longer name."""

_SPACE = re.compile(r"[ \t\n\r]*")
_TOKEN = re.compile(r'[\[\]{}:,"]|[-+.\w]{0,400}', re.ASCII)
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_ESCAPE_BEGIN = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_PUNCTUATION = frozenset('[]{}:,"')
_CLOSER = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"name", "id", "type", "index"})

Reading = Generator[None, None, None]
StringReading = Generator[None, None, str]


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model thinks, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Comes once for each call, before its arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments of the call that began last."""

    text: str


Event = Text | Reasoning | CallBegin | CallArguments


class MalformedError(ValueError):
    """The text at the reader's position cannot continue what is being read."""


class ToolParser(ABC):
    """Parses the answer of one choice.

    tools:     JSON schema of the arguments of each tool of the request, by its name.
    markers:   special tokens of the vocabulary that this format needs as text.
    is_marked: a marker precedes each call. A call of an unknown tool is then a call too, and the client reports the
               error to the model.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    is_marked: ClassVar[bool] = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._events: list[Event] = []
        self._spaces: list[str] = []  # at the end of the text
        self._has_calls = False
        self._in_call = False
        self._held: list[str] = []  # read before the buffer, not emitted yet
        self._buffer = ""
        self._start = 0  # of what has not been emitted
        self._at = 0  # end of what has been read
        self._kind: type[Text | Reasoning | CallArguments] | None = None
        """What becomes of the text that is read: an event of this type, or None, and the reader decides later."""
        self._reading = self._read()
        next(self._reading)

    @staticmethod
    def call_grammar(tools: Schemas, written: Written, is_single: bool) -> CallGrammar | None:
        """Return how an answer that begins with a call goes on; None: no grammar constrains the calls."""
        return None

    def feed(self, text: str) -> list[Event]:
        """Return the events that the next part of the answer completes."""
        self._hold()
        self._buffer = self._buffer[self._at :] + text
        self._start = self._at = 0
        next(self._reading)
        if self._kind is not None:
            self._flush()
        return self._new_events()

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""
        self._at = len(self._buffer)
        if not self._in_call:
            self._kind = Text
        self._flush()
        if not self._has_calls and self._spaces:
            self._events.append(Text("".join(self._spaces)))
        return self._new_events()

    @abstractmethod
    def _read(self) -> Reading:
        """Read the whole answer. Does not return."""

    def _new_events(self) -> list[Event]:
        """Return the collected events, with adjacent ones of the same type joined."""
        joined: list[Event] = []
        for kind, group in groupby(self._events, key=type):
            events = list(group)
            texts = [event.text for event in events if not isinstance(event, CallBegin)]
            joined += [kind("".join(texts))] if texts else events
        self._events = []
        return joined

    def _flush(self) -> None:
        """Emit what has been read as an event of the current kind; without a kind, drop it."""
        read = self._take_read()
        if self._kind is Text:
            # White space at the end is kept back: around calls it is part of the format.
            body = read.rstrip()
            if body:
                self._events.append(Text("".join([*self._spaces, body])))
                self._spaces.clear()
            if len(body) < len(read):
                self._spaces.append(read[len(body) :])
        elif self._kind is not None and read:
            self._events.append(self._kind(read))

    def _hold(self) -> None:
        """Move what has been read out of the buffer."""
        if self._start < self._at:
            self._held.append(self._buffer[self._start : self._at])
            self._start = self._at

    def _take_read(self) -> str:
        """Return what has been read and was not emitted, and forget it."""
        self._hold()
        read = "".join(self._held)
        self._held.clear()
        return read

    def _begin(self, name: str, arguments: str = "") -> None:
        """Emit the begin of a call, in place of what has been read, and arguments that are known already."""
        self._flush()
        self._spaces.clear()
        self._has_calls = self._in_call = True
        self._events.append(CallBegin(name))
        if arguments:
            self._events.append(CallArguments(arguments))

    def _accepts(self, name: str) -> bool:
        is_name = 0 < len(name) <= MAX_NAME_CHARACTERS and _is_unicode(name)
        return is_name and (self.is_marked or name in self._tools)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        """Read what matches the pattern, if anything does."""
        if (match := pattern.match(self._buffer, self._at)) is not None:
            self._at = match.end()

    def _read_space(self, pattern: re.Pattern[str], *, marker: str) -> Reading:
        """Read what matches the pattern, until it is known whether the marker follows."""
        while True:
            self._skip(pattern)
            following = self._buffer[self._at : self._at + len(marker)]
            if following == marker or not marker.startswith(following):
                return
            yield

    def _read_until(self, marker: str = "") -> Reading:
        """Read and flush up to a marker; without one, up to the end of the answer."""
        while not marker or (place := self._buffer.find(marker, self._at)) < 0:
            self._read_but(marker)
            self._flush()
            yield
        self._at = place
        self._flush()
        self._kind = None

    def _read_but(self, *markers: str) -> None:
        """Read the buffer but its end, if one of the markers, which is not in the buffer, may begin there."""
        self._at = len(self._buffer) - max(overlap(self._buffer, marker, start=self._at) for marker in markers)

    def _read_head(
        self, head: re.Pattern[str], *, begin: re.Pattern[str]
    ) -> Generator[None, None, re.Match[str] | None]:
        """Return the match of a pattern of bounded length, not read yet; None if it cannot follow.

        begin: matches all text that a match may begin with.
        """
        while (match := head.match(self._buffer, self._at)) is None:
            if begin.fullmatch(self._buffer, self._at) is None:
                return None
            yield
        return match

    def _read_text(self, marker: str = "") -> Reading:
        """Emit what is held, and what comes before the marker, as text. Hold the marker."""
        self._kind = Text
        yield from self._read_until(marker)
        self._at += len(marker)

    def _read_call(self, *, name: str | None = None, end: str = "") -> Generator[None, None, bool]:
        """Read one call. Return False, and hold what has been read, if it is not a call.

        name: of the function, if the text has only the arguments.
        end:  the marker after a call; a model may omit it. If the JSON of a call that has begun is malformed, its text
              up to the marker, or up to the end of the answer, is passed on as arguments: the client sees what the
              model wrote.
        """
        try:
            first = yield from self._token()
            _expect(first == "{")
            if name is None:
                yield from self._read_members()
            else:
                yield from self._stream_arguments(name)
        except (ValueError, RecursionError):
            if not self._in_call:
                return False
            yield from self._read_until(end)
        if end:
            yield from self._read_space(_SPACE, marker=end)
            if self._buffer.startswith(end, self._at):
                self._at += len(end)
        self._flush()
        self._in_call = False
        return True

    def _read_call_list(self) -> Reading:
        """Read the rest of `[call, call, …]` after the bracket. Hold what follows the last call."""
        while (yield from self._read_call()):
            separator = yield from self._token()
            if separator == "]":
                self._flush()
            if separator != ",":
                return

    def _read_members(self) -> Reading:
        """Read the rest of `{"name": …, "arguments": {…}}`, with its keys in any order, after the bracket."""
        name: str | None = None
        arguments: str | None = None
        token = yield from self._token()
        while token != "}":
            _expect(token == '"')
            key = json.loads((yield from self._raw(token)))
            # Before a call has begun, an unknown key shows that this is another kind of object.
            _expect(self._in_call or key in _ARGUMENT_KEYS or key in _OTHER_KEYS)
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
                    _expect(_is_unicode(arguments))
                elif key == "name":
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
        """Read an object whose bracket has been read, and pass it on while it is read."""
        self._begin(name)
        self._held.append("{")
        self._kind = CallArguments
        yield from self._value("{")
        self._flush()
        self._kind = None

    def _raw(self, token: str) -> StringReading:
        """Read one JSON value and return it as it is written. token: as for _value(); the text is not streamed."""
        self._at -= len(token)
        self._hold()
        begin = len(self._held)
        self._at += len(token)
        yield from self._value(token)
        self._hold()
        return "".join(self._held[begin:])

    def _value(self, token: str, *, depth: int = 0) -> Reading:
        """Read one JSON value. token: the first of the value, which has been read."""
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
        """Return the next bracket, `:`, `,`, `"`, or number or literal of JSON; "" for any other character."""
        while True:
            self._skip(_SPACE)
            begin = self._at
            self._skip(_TOKEN)
            token = self._buffer[begin : self._at]
            if token in _PUNCTUATION or self._at < len(self._buffer):
                return token
            self._at = begin  # the rest of the token may follow
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


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` with text around it: Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    call_grammar = staticmethod(call_grammars.hermes)

    def _read(self) -> Reading:
        while True:
            yield from self._read_text(self.OPEN)
            yield from self._read_call(end=self.CLOSE)


class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`: Qwen3-Coder.

    A value is text. It becomes the JSON value that the schema of the parameter allows, or else a string.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    call_grammar = staticmethod(call_grammars.qwen3_coder)
    _FUNCTION = re.compile(r"\s{0,64}<function=([\w.-]{1,256})>")
    _FUNCTION_BEGIN = re.compile(r"\s{0,64}(?:<[^>]{0,266})?")
    """While this is all that has come, the name may follow."""
    _PARAMETER = re.compile(r"\s{0,64}<parameter=([^>\n]{1,256})>")
    _PARAMETER_BEGIN = re.compile(r"\s{0,64}(?:<[^>\n]{0,266})?")
    _VALUE_END = "</parameter>"
    _VALUE_OR_CALL_END = re.compile(f"{_VALUE_END}|{CLOSE}")

    def _read(self) -> Reading:
        while True:
            yield from self._read_text(self.OPEN)
            head = yield from self._read_head(self._FUNCTION, begin=self._FUNCTION_BEGIN)
            if head is not None:
                self._at = head.end()
                yield from self._read_parameters(head[1])

    def _read_parameters(self, name: str) -> Reading:
        """Read a call after its name, and pass each parameter on when it is complete."""
        self._begin(name)
        properties = self._tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        separator = "{"
        while (parameter := (yield from self._read_parameter())) is not None:
            name, text = parameter
            value = _value_of(text, schemas.get(name))
            self._events.append(CallArguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: {value}"))
            separator = ", "
        yield from self._read_until(self.CLOSE)
        self._events.append(CallArguments("{}" if separator == "{" else "}"))
        self._at += len(self.CLOSE)
        self._flush()
        self._in_call = False

    def _read_parameter(self) -> Generator[None, None, tuple[str, str] | None]:
        """Return name and text of the next parameter; None if the call ends first, or if none follows."""
        head = yield from self._read_head(self._PARAMETER, begin=self._PARAMETER_BEGIN)
        if head is None or head[0].endswith(self.CLOSE):
            return None
        self._at = head.end()
        self._flush()
        while (end := self._VALUE_OR_CALL_END.search(self._buffer, self._at)) is None:
            self._read_but(self._VALUE_END, self.CLOSE)
            yield
        self._at = end.start()
        if end[0] == self.CLOSE:
            return None
        text = self._take_read()
        self._at = end.end()
        self._flush()
        return head[1], text.removeprefix("\n").removesuffix("\n")


class HarmonyParser(ToolParser):
    """The messages of gpt-oss, each `<|channel|>channel [to=recipient] …<|message|>…<|end|>`.

    Channel `analysis` is reasoning, a message to `functions.name` is a call, and any other message is text. Without
    tools, no message is a call.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    _MESSAGE, _END = "<|message|>", "<|end|>"
    _RECIPIENT = re.compile(r"to=functions\.([\w.-]{1,256})")
    _CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,64})")

    def finish(self) -> list[Event]:
        """Return the remaining events. An incomplete header is dropped."""
        if self._kind is None:
            header = self._take_read() + self._buffer[self._at :]
            if not header.startswith(("<|start|>", "<|channel|>")):
                self._held.append(header)
            self._start = self._at = len(self._buffer)
        return super().finish()

    def _read(self) -> Reading:
        while True:
            while (place := self._buffer.find(self._MESSAGE, self._at)) < 0:
                self._read_but(self._MESSAGE)
                yield
            self._at = place
            header = self._take_read()
            self._at += len(self._MESSAGE)
            recipient, channel = self._RECIPIENT.search(header), self._CHANNEL.search(header)
            if recipient is not None and self._tools:
                self._begin(recipient[1])
                self._kind = CallArguments
            else:
                self._flush()
                self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Text
            yield from self._read_until(self._END)
            self._at += len(self._END)
            self._flush()
            self._in_call = False


class Llama3JsonParser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, several with `;` between: Llama 3.

    An answer that does not begin with an object that names a tool is text.
    """

    TAG = "<|python_tag|>"
    _SEPARATORS = re.compile(r"(?:[ \t\r\n;]|<\|python_tag\|>)*")
    markers: ClassVar[tuple[str, ...]] = (TAG,)
    call_grammar = staticmethod(call_grammars.llama3_json)
    is_marked: ClassVar[bool] = False

    def _read(self) -> Reading:
        while True:
            self._in_call = self._has_calls  # what separates calls is dropped
            yield from self._read_space(self._SEPARATORS, marker=self.TAG)
            if self._in_call:
                self._flush()
            self._in_call = False
            if not (yield from self._read_call()):
                break
        yield from self._read_text()


class MistralParser(ToolParser):
    """Text, then `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral."""

    MARKER = "[TOOL_CALLS]"
    markers: ClassVar[tuple[str, ...]] = (MARKER, "[ARGS]", "[CALL_ID]")
    call_grammar = staticmethod(call_grammars.mistral)
    _HEAD = re.compile(
        r"\s{0,8}(?:(?P<list>\[)|(?:(?P<name>[\w.-]{1,64})[ \t]{0,8}"
        r"(?:\[CALL_ID\][ \t]{0,8}\w{0,32}[ \t]{0,8})?(?:\[ARGS\][ \t]{0,8})?)?(?=\{))"
    )
    _HEAD_BEGIN = re.compile(r"[^{]{0,160}")
    """While this is all that has come, the head may follow, which is never longer."""

    def _read(self) -> Reading:
        while True:
            yield from self._read_text(self.MARKER)
            head = yield from self._read_head(self._HEAD, begin=self._HEAD_BEGIN)
            if head is None:
                continue
            self._at = head.end()
            if head["list"]:
                yield from self._read_call_list()
            else:
                yield from self._read_call(name=head["name"])


class PythonicParser(ToolParser):
    """`[name(argument="value"), …]` as the whole answer, a Python list of calls with literal arguments: Llama 4.

    An answer that does not begin with `[name(` of a tool is text. Each call is emitted when it is complete.
    """

    is_marked: ClassVar[bool] = False
    MAX_CALL_CHARACTERS = 256 * 1024
    MAX_DEPTH = 64

    def _read(self) -> Reading:
        while (character := (yield from self._character())).isspace():
            pass
        if character == "[":
            yield from self._read_list()
        yield from self._read_text()

    def _character(self) -> StringReading:
        while self._at == len(self._buffer):
            yield
        self._at += 1
        return self._buffer[self._at - 1]

    def _read_list(self) -> Reading:
        """Read up to the end of the list, or to the first character that a list of calls cannot have."""
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
            elif depth == 0 and character in ",]":
                text = "".join(call).strip()
                is_trailing_comma = not text and self._has_calls and character == "]"
                if not is_trailing_comma:
                    if (read := _python_call(text)) is None:
                        return
                    self._begin(*read)
                    self._in_call = False
                call.clear()
                self._flush()
                if character == "]":
                    return
                continue
            elif character in "'\"":
                quote = character
            elif character in "([{":
                if character == "(" and depth == 0 and not self._accepts("".join(call).strip()):
                    return
                depth += 1
            elif character in ")]}":
                depth -= 1
            call.append(character)


class RequiredParser(ToolParser):
    """`tool_choice: required`: a grammar restricts the answer to a list of calls."""

    def _read(self) -> Reading:
        if (yield from self._token()) == "[":
            yield from self._read_call_list()
        yield from self._read_text()


class NamedParser(ToolParser):
    """`tool_choice` names one tool: a grammar restricts the answer to its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__({name: {}})

    def _read(self) -> Reading:
        yield from self._read_call(name=self._name)
        yield from self._read_text()


def _python_call(text: str) -> tuple[str, str] | None:
    """Return name and JSON arguments of a call; None unless all its arguments are literals given by keyword."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        arguments: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return (ast.unparse(tree.func), written) if _is_unicode(written) else None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _value_of(text: str, schema: Any) -> str:
    """Return the text of a parameter as JSON: as it is if it is a value that the schema may allow, else as a string."""
    allowed = schema.get("type") if isinstance(schema, Mapping) else None
    if allowed != "string":
        try:
            if not isinstance(json.loads(text), str):
                return text
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "gpt_oss": HarmonyParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_FORMATS = (
    ("<|channel|>", "gpt_oss"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""Text of a chat template, and the format that a template with this text describes. The first match counts."""


def parser_of(name: str, *, template: str | None) -> type[ToolParser] | None:
    """Return the parser for a setting: a name of PARSERS, "none" or "auto". Raises ValueError for another name.

    template: "auto" takes the format that this chat template describes, or the Hermes format if it describes none.
    """
    if name == "auto":
        name = next((format_ for text, format_ in _FORMATS if text in (template or "")), "hermes")
    if name != "none" and name not in PARSERS:
        raise ValueError(f"there is no tool-call parser {name!r}: use auto, none or one of {', '.join(PARSERS)}")
    return PARSERS.get(name)


def overlap(text: str, marker: str, *, start: int = 0) -> int:
    """Return the length of the longest end of `text[start:]` with which `marker` begins, and which is not all of it."""
    longest = min(len(text) - start, len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which a JSON escape can name and no answer can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect(condition: bool) -> None:
    if not condition:
        raise MalformedError
