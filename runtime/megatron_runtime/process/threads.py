"""Runs blocking calls outside the event loop, even while the interpreter exits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_loop(function: Callable[[], T]) -> T:
    """Run `function` on a thread, as asyncio.to_thread() does, and return its result.

    While the interpreter exits, the function runs on the current thread, because no new thread can be started at that
    time.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        return function()
    return await running
