"""Answers whose form a grammar has fixed (`tool_choice`): a list of calls, or the arguments of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from megatron_runtime.server.tools.calls import CallList, RawArguments, Reader
from megatron_runtime.server.tools.json_scan import Verdict
from megatron_runtime.server.tools.parser import Attempt, ToolParser


class _ForcedParser(ToolParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._call: Attempt | None = Attempt(self._reader())

    @abstractmethod
    def _reader(self) -> Reader: ...

    def _step(self, character: str) -> None:
        if self._call is None:
            self._text(character)
            return
        verdict = self._call.feed(character)
        if verdict is Verdict.INVALID:
            self._text(self._call.held)
        if verdict in (Verdict.INVALID, Verdict.DONE):
            self._call = None

    def _end(self) -> None:
        if self._call is not None:
            self._text(self._call.held)


class RequiredParser(_ForcedParser):
    """`tool_choice: required`: the whole answer is a list of calls."""

    def _reader(self) -> Reader:
        return CallList(self.sink)


class NamedParser(_ForcedParser):
    """`tool_choice` names the one tool: the whole answer is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__([name])

    def _reader(self) -> Reader:
        return RawArguments(self.sink, self._name)
