"""Waiting for what another process makes true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_SECONDS = 0.1


async def eventually(condition: Callable[[], Awaitable[bool]], *, seconds: float, what: str) -> None:
    """Until `condition` holds. Raises AssertionError saying what did not come."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if await condition():
                    return
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
