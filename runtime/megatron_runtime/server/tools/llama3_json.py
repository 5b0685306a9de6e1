"""`{"name": …, "parameters": {…}}` as the whole answer, as Llama 3 models write calls; several with `;` between."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from megatron_runtime.server.tools.calls import CallObject
from megatron_runtime.server.tools.json_scan import Verdict
from megatron_runtime.server.tools.parser import Attempt, MarkerFinder, ToolParser

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """An answer that begins with an object that names a tool is calls; every other answer is text."""

    markers: ClassVar[tuple[str, ...]] = (PYTHON_TAG,)
    is_marked: ClassVar[bool] = False

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._tag = MarkerFinder(PYTHON_TAG)
        self._call: Attempt | None = None
        self._between = ""  # white space and marks before the next call
        self._is_text = False

    def _step(self, character: str) -> None:
        if self._is_text:
            self._text(character)
        elif self._call is not None:
            verdict = self._call.feed(character)
            if verdict is Verdict.INVALID:
                self._becomes_text(self._call.held)
            elif verdict is Verdict.DONE:
                self._call = None
        else:
            self._before_call(character)

    def _before_call(self, character: str) -> None:
        released, found = self._tag.feed(character)
        self._between += released
        if found:
            self._between += PYTHON_TAG
        elif released == "{" and not self._tag.held:
            self._call = Attempt(CallObject(self.sink), raw=self._between[:-1])
            self._between = ""
            self._call.feed("{")
        elif released.strip(" \t\r\n;"):
            self._becomes_text(released if self._has_calls else self._between)

    def _becomes_text(self, text: str) -> None:
        self._is_text, self._call = True, None
        rest, self._tag.held, self._between = self._tag.held, "", ""
        self._text(text + rest)

    def _end(self) -> None:
        if self._call is not None:
            self._text(self._call.held)
        elif not self._is_text and not self._has_calls:
            self._text(self._between + self._tag.held)
