"""Tokenization and rendering beside the event loop, with bounds on what runs and what waits.

The work runs in threads of three lanes, first in, first out: rendering of conversations, tokenization of texts up to
MAX_MEDIUM_BYTES, and of longer ones. So a text of a few kilobytes never waits for megabytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

from megatron_runtime.server.errors import ApiError
from megatron_runtime.tokenization.chat_template import RENDERERS

MAX_MEDIUM_BYTES = 64 * 1024
"""A text of this length is tokenized in some 50 ms."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Text that is being tokenized or rendered, or waits for it, in a server process; beyond that 503."""
MAX_WAIT_SECONDS = 30.0
"""A request that has not been tokenized by then is answered with 503."""

_T = TypeVar("_T")


class Lane(Enum):
    """Value: how many run at once."""

    RENDER = RENDERERS
    MEDIUM = 3
    LONG = 1


class TextWork:
    """The lanes of one server process. Used on the event loop.

    max_held_bytes, max_wait_seconds: see MAX_HELD_BYTES and MAX_WAIT_SECONDS.
    """

    def __init__(self, *, max_held_bytes: int = MAX_HELD_BYTES, max_wait_seconds: float = MAX_WAIT_SECONDS) -> None:
        self._max_held_bytes = max_held_bytes
        self._max_wait_seconds = max_wait_seconds
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._threads = {lane: ThreadPoolExecutor(lane.value, f"text-{lane.name.lower()}") for lane in Lane}

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    async def run(self, lane: Lane, size: int, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, called in a thread of `lane`. What still waits when the caller leaves is dropped.

        size: bytes of text that it holds.
        Raises ApiError 503 when too much is held already, or the wait was too long, and what `work` raises.
        """
        with self._lock:
            if self._held_bytes and self._held_bytes + size > self._max_held_bytes:
                message = f"This server has {self._max_held_bytes} bytes of text to tokenize already: try again."
                raise ApiError(503, message, code="too_much_text", retry_after_seconds=1)
            self._held_bytes += size
        future = self._threads[lane].submit(work)
        future.add_done_callback(lambda _: self._release(size))
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                return await _result(future)
        except TimeoutError as error:
            message = f"The text was not tokenized within {self._max_wait_seconds:g} s: try again, or shorten it."
            raise ApiError(503, message, code="too_much_text", retry_after_seconds=1) from error

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, size: int) -> None:
        with self._lock:
            self._held_bytes -= size


async def _result(future: Future[_T]) -> _T:
    return await asyncio.wrap_future(future)
