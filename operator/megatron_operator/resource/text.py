"""Text for a status, an Event, a log or a terminal. Escapes untrusted text and formats timestamps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from megatron_runtime.protocol.text import printable as printable


def printable_data(value: Any, *, limit: int) -> Any:
    """Return plain data, such as a status, with every string escaped and limited to `limit` characters."""
    if isinstance(value, str):
        return printable(value)[:limit]
    if isinstance(value, dict):
        return {key: printable_data(each, limit=limit) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(each, limit=limit) for each in value]
    return value


def stamp(moment: datetime) -> str:
    """Return a timestamp in RFC 3339 with milliseconds, precise enough to compute durations."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_seconds(moment: datetime) -> str:
    """Return a timestamp in RFC 3339 with seconds, as conditions use it."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def seconds_since(text: str | None, now: datetime) -> float:
    """Return the seconds from a timestamp to `now`, or infinity without a timestamp."""
    moment = parse(text)
    return (now - moment).total_seconds() if moment is not None else float("inf")
