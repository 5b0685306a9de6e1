"""Waiting for what another process makes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_SECONDS = 0.1
LONG_SECONDS = 480
"""What must come has come by then, on any machine. Where it comes at once nobody waits for so long."""


async def eventually(
    condition: Callable[[], Awaitable[bool]],
    *,
    seconds: float = LONG_SECONDS,
    what: str,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Until `condition` holds. Raises AssertionError saying what did not come."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if await condition():
                    return
                await asyncio.sleep(look_seconds)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
