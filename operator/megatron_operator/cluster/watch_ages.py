"""Age of each watch: time since the API server last accepted it.

The server ends every watch after `watch_seconds`, and kopf renews it from the last seen version. So a watch that is not
renewed in time is dead, whatever the reason: a proxy dropped its connection, the server rejects it, or kopf stopped
watching.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

GRACE_SECONDS = 5.0
"""Margin that lets the server end a watch before the client does."""

NOT_FOUND = 404


class WatchAges:
    """Watches of all sessions that use trace(), by path."""

    def __init__(self, *, watch_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._due = watch_seconds + GRACE_SECONDS
        self._clock = clock
        self._taken: dict[str, float] = {}
        self.vanished = asyncio.Event()
        """Set when the API server no longer serves a watched kind. Then kopf must be stopped."""

    @property
    def silent_seconds(self) -> float:
        """How long the oldest watch is overdue, in seconds; 0 if none is."""
        oldest = min(self._taken.values(), default=None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest - self._due)

    def trace(self) -> aiohttp.TraceConfig:
        """Return a trace configuration that reports the requests of a session to this object."""
        config = aiohttp.TraceConfig()
        config.on_request_start.append(self._asked)
        config.on_request_end.append(self._answered)
        return config

    async def _asked(self, _: aiohttp.ClientSession, __: object, request: aiohttp.TraceRequestStartParams) -> None:
        if _is_watch(request.url):
            # A watch that was never accepted counts from its first request.
            self._taken.setdefault(request.url.path, self._clock())

    async def _answered(self, _: aiohttp.ClientSession, __: object, answer: aiohttp.TraceRequestEndParams) -> None:
        if _is_watch(answer.url) and answer.response.ok:
            self._taken[answer.url.path] = self._clock()
        elif answer.url.path in self._taken and answer.response.status == NOT_FOUND:
            self.vanished.set()
            await asyncio.Event().wait()


def _is_watch(url: URL) -> bool:
    return url.query.get("watch") == "true"
