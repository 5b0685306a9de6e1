"""Waits for a condition that another process makes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from machine import scaled

LOOK_SECONDS = 0.1
LONG_SECONDS = scaled(120)
"""A timeout that only a defect exceeds, scaled to this machine."""


async def eventually(
    condition: Callable[[], Awaitable[bool]],
    *,
    seconds: float = 120,
    what: str,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Return when `condition` holds. Raises AssertionError with `what` after scaled(seconds)."""
    limit = scaled(seconds)
    waiting = asyncio.timeout(limit)
    try:
        async with waiting:
            while True:
                if await condition():
                    return
                await asyncio.sleep(look_seconds)
    except TimeoutError:
        if not waiting.expired():
            raise  # of the condition itself
        raise AssertionError(f"not within {limit:g} s: {what}") from None
