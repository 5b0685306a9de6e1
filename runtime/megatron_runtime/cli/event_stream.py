"""Server-sent events as our own clients read them. The server is not trusted: bounds on lines, types, characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_EVENT_BYTES = 16 << 20
"""Of one line of a stream."""
MAX_ERROR_BYTES = 64 << 10
"""That are read of an answer which is no stream."""

_DATA = b"data:"
_DONE = b"[DONE]"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class StreamFormatError(ValueError):
    """What the server sent is not a stream of completions. The message says why."""


class StreamFailedError(Exception):
    """The server ended the stream with an error event. The message is the server's."""


class EventReader:
    """Cuts bytes into lines, and parses the events among them.

    is_done: whether the stream came to its end.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the events that `data` completes; nothing after the end.

        Raises StreamFormatError, or StreamFailedError for an error event.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = bytes(self._rest) + line
            self._rest.clear()
            event = self._event(whole)
            if event is not None:
                yield event
            if self.is_done:
                return
        if len(self._rest) + len(rest) > MAX_EVENT_BYTES:
            raise StreamFormatError(f"a line of its stream has more than {MAX_EVENT_BYTES} bytes")
        self._rest += rest

    def _event(self, line: bytes) -> dict[str, Any] | None:
        if not line.startswith(_DATA):
            return None
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            self.is_done = True
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StreamFormatError(f"an event is not valid JSON: {error}") from error
        if not isinstance(event, dict):
            raise StreamFormatError(f"an event is {type(event).__name__}: want a JSON object")
        if "error" in event:
            failure = event["error"]
            message = failure.get("message") if isinstance(failure, dict) else failure
            raise StreamFailedError(terminal_text(str(message)))
        return event


def texts_of(event: dict[str, Any]) -> Iterator[str]:
    """The text of each choice of an event, of a completion or of a chat. Raises StreamFormatError."""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else [None]:
        holder, key = (choice, "text") if isinstance(choice, dict) and "text" in choice else (choice, "delta")
        value = holder.get(key) if isinstance(holder, dict) else None
        if key == "delta" and isinstance(value, dict):
            value = value.get("content") or ""
        if not isinstance(value, str):
            raise StreamFormatError("an event has no choices with text or delta")
        yield value


def terminal_text(text: str) -> str:
    """The text without what a terminal would obey: control characters but tab and newline are written out."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
