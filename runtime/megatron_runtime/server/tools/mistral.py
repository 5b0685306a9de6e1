"""`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name[ARGS]{…}` of the newer tokenizers."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from megatron_runtime.server.tools.calls import CallList, CallObject, RawArguments, Reader
from megatron_runtime.server.tools.json_scan import Verdict
from megatron_runtime.server.tools.parser import Attempt, MarkerFinder, ToolParser

MARKER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_MAX_HEAD = 160


class MistralParser(ToolParser):
    """Text, then calls after the marker."""

    markers: ClassVar[tuple[str, ...]] = (MARKER, ARGUMENTS, CALL_ID)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._marker = MarkerFinder(MARKER)
        self._head: str | None = None  # what follows the marker, until it shows which form this is
        self._call: Attempt | None = None

    def _step(self, character: str) -> None:
        if self._call is not None:
            verdict = self._call.feed(character)
            if verdict is Verdict.INVALID:
                self._text(self._call.held)
            if verdict in (Verdict.INVALID, Verdict.DONE):
                self._call = None
        elif self._head is not None:
            self._in_head(self._head, character)
        else:
            released, found = self._marker.feed(character)
            self._text(released)
            if found:
                self._head = ""

    def _in_head(self, head: str, character: str) -> None:
        is_blank = not head.strip()
        named = _HEAD.fullmatch(head)
        reader: Reader | None = None
        if character == "[" and is_blank:
            reader = CallList(self.sink)
        elif character == "{" and is_blank:
            reader = CallObject(self.sink)
        elif character == "{" and named is not None:
            reader = RawArguments(self.sink, named[1])
        if reader is not None:
            self._call, self._head = Attempt(reader, raw=MARKER + head), None
            self._call.feed(character)
        elif len(head) < _MAX_HEAD and character != "\n" and character != "{":
            self._head = head + character
        else:
            self._head = None
            self._text(MARKER + head + character)

    def _end(self) -> None:
        if self._call is not None:
            self._text(self._call.held)
        elif self._head is not None:
            self._text(MARKER + self._head)
        else:
            self._text(self._marker.held)
