"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from megatron_runtime.server.tools.calls import CallObject
from megatron_runtime.server.tools.json_scan import Verdict
from megatron_runtime.server.tools.parser import Attempt, MarkerFinder, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Text, calls between markers, more text."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._opening = MarkerFinder(OPEN)
        self._closing = MarkerFinder(CLOSE)
        self._call: Attempt | None = None
        self._is_closing = False

    def _step(self, character: str) -> None:
        if self._is_closing:
            self._in_closing(character)
        elif self._call is not None:
            self._in_call(self._call, character)
        else:
            released, found = self._opening.feed(character)
            self._text(released)
            if found:
                self._call = Attempt(CallObject(self.sink), raw=OPEN)

    def _in_call(self, call: Attempt, character: str) -> None:
        if call.is_broken:
            released, found = self._closing.feed(character)
            for one in released:
                call.feed(one)
            if found:
                self._call = None
            return
        verdict = call.feed(character)
        if verdict is Verdict.INVALID:
            self._call = None
            self._text(call.held)
        elif verdict is Verdict.DONE:
            self._call, self._is_closing = None, True

    def _in_closing(self, character: str) -> None:
        """A model that forgets the closing marker goes on with text or with the next call."""
        released, found = self._closing.feed(character)
        if found or released.strip():
            self._is_closing = False
            rest, self._closing.held = released + self._closing.held, ""
            for one in rest if not found else "":
                self._step(one)

    def _end(self) -> None:
        if self._call is not None and self._call.is_broken:
            for character in self._closing.held:
                self._call.feed(character)
        elif self._call is not None:
            self._text(self._call.held)
        elif not self._is_closing:
            self._text(self._opening.held)
