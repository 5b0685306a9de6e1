"""Waiting for what another process makes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from machine import scaled

LOOK_SECONDS = 0.1
LONG_SECONDS = scaled(120)
"""A timeout that only a defect reaches, on this machine."""


async def eventually(
    condition: Callable[[], Awaitable[bool]],
    *,
    seconds: float = 120,
    what: str,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Return when `condition` holds. Raises AssertionError naming `what` after `seconds` of an idle machine."""
    limit = scaled(seconds)
    try:
        async with asyncio.timeout(limit):
            while True:
                if await condition():
                    return
                await asyncio.sleep(look_seconds)
    except TimeoutError:
        raise AssertionError(f"not within {limit:g} s: {what}") from None
