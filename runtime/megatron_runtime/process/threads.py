"""Blocking calls of an event loop, also when the interpreter is about to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_loop(function: Callable[[], T]) -> T:
    """Run `function` on a thread, as asyncio.to_thread() does. At the end of the interpreter run it here.

    Exit handlers run after the interpreter has stopped to start threads.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        return function()
    return await running
