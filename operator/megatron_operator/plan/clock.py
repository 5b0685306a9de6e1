"""Timestamps of the status. The current time is `World.now`."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(moment: datetime) -> str:
    """Return RFC 3339 with milliseconds, for durations."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_seconds(moment: datetime) -> str:
    """Return RFC 3339 with seconds, for conditions."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def seconds_since(text: str | None, now: datetime) -> float:
    """Return the seconds from a timestamp to now; infinity without a timestamp."""
    moment = parse(text)
    return (now - moment).total_seconds() if moment is not None else float("inf")
