"""What every tool-call parser is: text in, as it comes; text and calls out. How the text is cut changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from megatron_runtime.server.tools.calls import CallSink, Reader
from megatron_runtime.server.tools.json_scan import Verdict


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Comes once for each call, before its arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of the call that began last."""

    text: str


Event = Text | CallBegin | CallArguments


class ToolParser(ABC):
    """Reads the answer of one choice.

    names:     the tools of the request.
    markers:   special tokens of the vocabulary that this format needs to see.
    is_marked: a marker stands before each call, so that a call of an unknown tool is a call all the same: the caller
               tells the model.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    is_marked: ClassVar[bool] = True

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._events: list[Event] = []
        self._space = ""
        self._has_calls = False
        self.sink = CallSink(
            accepts=lambda name: self.is_marked or name in self._names, begin=self._begin, arguments=self._arguments
        )

    def feed(self, text: str) -> list[Event]:
        """Return what this further text completes."""
        for character in text:
            self._step(character)
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the rest: the answer ends here."""
        self._end()
        if not self._has_calls and self._space:
            self._events.append(Text(self._space))
        return self._taken()

    @abstractmethod
    def _step(self, character: str) -> None: ...

    @abstractmethod
    def _end(self) -> None:
        """The text ended: give out what was held back."""

    def _text(self, text: str) -> None:
        """Give out text. White space around calls belongs to the format, so it waits for what follows."""
        held = self._space + text
        body = held.rstrip()
        self._space = held[len(body) :]
        if body:
            self._events.append(Text(body))

    def _begin(self, name: str) -> None:
        self._space = ""
        self._has_calls = True
        self._events.append(CallBegin(name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def _taken(self) -> list[Event]:
        """The events so far, neighbours of a kind joined."""
        joined: list[Event] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, Text) and isinstance(last, Text):
                joined[-1] = Text(last.text + event.text)
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(last.text + event.text)
            else:
                joined.append(event)
        self._events = []
        return joined


class Attempt:
    """Text that is read as a call. Until one has begun it can still turn out to be plain text."""

    def __init__(self, reader: Reader, *, raw: str = "") -> None:
        self._reader = reader
        self._raw = raw
        self.is_broken = False

    @property
    def held(self) -> str:
        """What would be plain text if the answer ended here."""
        return "" if self._reader.begun else self._raw

    def feed(self, character: str) -> Verdict:
        """As a reader's; INVALID comes only while the text can still be given out as it is.

        A model may break its JSON in the arguments of a call that has begun. What it writes is then passed on as
        arguments that are no valid JSON: the caller sees what the model did.
        """
        if self.is_broken:
            self._reader.after_error(character)
            return Verdict.MORE
        self._raw += character
        verdict = self._reader.feed(character)
        if self._reader.begun:
            self._raw = ""
            if verdict is Verdict.INVALID:
                self.is_broken = True
                self._reader.after_error(character)
                return Verdict.MORE
        return verdict


class MarkerFinder:
    """Finds a marker in text that comes character by character."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self.held = ""
        """The beginning of what may become the marker."""

    def feed(self, character: str) -> tuple[str, bool]:
        """Return text that is no part of the marker, and whether the marker is complete."""
        self.held += character
        skipped = 0
        while not self._marker.startswith(self.held[skipped:]):
            skipped += 1
        released, self.held = self.held[:skipped], self.held[skipped:]
        if self.held == self._marker:
            self.held = ""
            return released, True
        return released, False
