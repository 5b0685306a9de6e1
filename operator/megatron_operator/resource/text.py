"""Text for a status, an Event, a log or a terminal. Escapes untrusted text and formats timestamps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from megatron_runtime.protocol.text import printable as printable


def printable_data(value: Any, *, limit: int) -> Any:
    """Return a copy of `value`, such as a status, with all strings escaped and truncated to `limit` characters."""
    if isinstance(value, str):
        return printable(value)[:limit]
    if isinstance(value, dict):
        return {key: printable_data(each, limit=limit) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(each, limit=limit) for each in value]
    return value


def stamp(moment: datetime) -> str:
    """Return a timestamp in RFC 3339 format with milliseconds, from which durations can be computed."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_seconds(moment: datetime) -> str:
    """Return a timestamp in RFC 3339 format with seconds, as conditions require."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def seconds_since(text: str | None, now: datetime) -> float:
    """Return the seconds from the timestamp `text` to `now`. Returns infinity if `text` is None."""
    moment = parse(text)
    return (now - moment).total_seconds() if moment is not None else float("inf")
