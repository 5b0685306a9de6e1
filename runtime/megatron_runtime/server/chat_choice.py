"""One choice of a chat: its pieces as deltas, and the same deltas put together as a message."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.server.generation import Piece
from megatron_runtime.server.logprobs import TokenLogProb
from megatron_runtime.server.tools import CallArguments, CallBegin, Event, Text, ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Nine letters and digits: some chat templates accept no other ids."""

CARRIED = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs", "raw_text"})
"""What a message may say of its making."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one chunk of a stream says of a choice; the last one has the reason why it ended."""

    index: int
    delta: dict[str, Any]
    finish_reason: str | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ChatChoice:
    """Turns the pieces of one choice into deltas.

    parser:    finds calls in the text; None where there are no tools.
    is_named:  the request named the one tool to call; then the answer ends with "stop".
    is_single: only the first call is given out.
    carried:   what the message says of its making, by its last piece.
    """

    def __init__(
        self,
        index: int,
        *,
        parser: ToolParser | None = None,
        is_named: bool = False,
        is_single: bool = False,
        carried: Callable[[Piece], dict[str, Any]] = lambda _piece: {},
    ) -> None:
        self._index = index
        self._carried = carried
        self._parser = parser
        self._is_named = is_named
        self._is_single = is_single
        self._calls = 0
        self._has_begun = False
        self._log_probs: list[TokenLogProb] = []
        self._token_ids: list[int] = []

    def feed(self, piece: Piece) -> Iterator[Delta]:
        """Yield the deltas of one piece. Log-probabilities go with the first delta that follows their token."""
        if not self._has_begun:
            self._has_begun = True
            yield Delta(self._index, {"role": "assistant", "content": ""})
        self._log_probs += piece.log_probs
        self._token_ids += piece.token_ids
        for event in self._events(piece):
            delta = self._delta(event)
            if delta is not None:
                yield self._next(delta)
        if piece.finish_reason is not None:
            yield self._next(self._carried(piece), self._reason(piece.finish_reason))

    def _events(self, piece: Piece) -> list[Event]:
        if self._parser is None:
            return [Text(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else [*events, *self._parser.finish()]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text):
                return {"content": text}
            case CallBegin(name):
                self._calls += 1
                if self._is_single and self._calls > 1:
                    return None
                call = {"index": self._calls - 1, "id": _call_id(), "type": "function"}
                return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}
            case CallArguments(text):
                if self._is_single and self._calls > 1:
                    return None
                return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]}

    def _next(self, delta: dict[str, Any], reason: str | None = None) -> Delta:
        log_probs, self._log_probs = self._log_probs, []
        token_ids, self._token_ids = self._token_ids, []
        return Delta(self._index, delta, reason, log_probs, token_ids)

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._calls and not self._is_named else reason


@dataclass(slots=True)
class Message:
    """A whole message, put together from its deltas.

    empty: the content where the model wrote calls and no text.
    """

    empty: str | None
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    carried: dict[str, Any] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        self.text += delta.delta.get("content", "")
        for part in delta.delta.get("tool_calls", ()):
            if "id" in part:
                call = {key: value for key, value in part.items() if key != "index"}
                self.calls.append({**call, "function": dict(part["function"])})
            else:
                self.calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        self.carried |= {key: delta.delta[key] for key in CARRIED & delta.delta.keys()}
        self.finish_reason = delta.finish_reason
        self.log_probs += delta.log_probs
        self.token_ids += delta.token_ids

    def as_json(self) -> dict[str, Any]:
        content = self.text if self.text or not self.calls else self.empty
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **self.carried}
        return {**message, "tool_calls": self.calls} if self.calls else message


def _call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
