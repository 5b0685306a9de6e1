"""Times as the status holds them. The only present time is `World.now`."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(moment: datetime) -> str:
    """RFC 3339 to the millisecond, for durations."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_seconds(moment: datetime) -> str:
    """RFC 3339 to the second, as conditions are written."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def seconds_since(text: str | None, now: datetime) -> float:
    """Seconds from a stamp to now; infinity when there is no stamp."""
    moment = parse(text)
    return (now - moment).total_seconds() if moment is not None else float("inf")
