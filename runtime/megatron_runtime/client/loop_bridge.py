"""Futures that are made on one event loop and settled from another, which may run in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def awaited(send: Callable[[], Awaitable[T]]) -> T:
    """The result of what `send` returns: it is called where the coroutine runs."""
    return await send()


async def called(action: Callable[[], None]) -> None:
    action()


def settle(future: asyncio.Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
    """Give `future` its result or error, on its own loop. One that is done stays as it is."""

    def act() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    _on_loop_of(future, act)


def cancel(future: asyncio.Future[Any]) -> None:
    _on_loop_of(future, future.cancel)


def _on_loop_of(future: asyncio.Future[Any], action: Callable[[], object]) -> None:
    loop = future.get_loop()
    if loop is not running_loop() and loop.is_running():
        loop.call_soon_threadsafe(action)
    elif not loop.is_closed():
        action()
    # A closed loop has nobody left who waits.
