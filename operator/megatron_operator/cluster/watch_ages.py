"""How long ago the API server last took each watch.

The server ends every watch after `watch_seconds`, and kopf asks for it anew from the version it has come to. So a watch
that is not taken again in time brings nothing any more, whatever the reason: its connection is forgotten on the way,
the server refuses it, or nobody asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

GRACE_SECONDS = 5.0
"""For the server to end a watch by itself before the client does."""

NOT_FOUND = 404


class WatchAges:
    """The watches of all sessions that are made with `trace()`, by their path."""

    def __init__(self, *, watch_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._due = watch_seconds + GRACE_SECONDS
        self._clock = clock
        self._taken: dict[str, float] = {}
        self.vanished = asyncio.Event()
        """A kind that was watched is served no more. Who asked for it gets no answer: it is to be ended."""

    @property
    def silent_seconds(self) -> float:
        """How long the oldest watch is overdue; 0 when none is."""
        oldest = min(self._taken.values(), default=None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest - self._due)

    def trace(self) -> aiohttp.TraceConfig:
        """What tells this object of the requests of a session."""
        config = aiohttp.TraceConfig()
        config.on_request_start.append(self._asked)
        config.on_request_end.append(self._answered)
        return config

    async def _asked(self, _: aiohttp.ClientSession, __: object, request: aiohttp.TraceRequestStartParams) -> None:
        if _is_watch(request.url):
            # One that was never taken is as old as the first time that it was asked for.
            self._taken.setdefault(request.url.path, self._clock())

    async def _answered(self, _: aiohttp.ClientSession, __: object, answer: aiohttp.TraceRequestEndParams) -> None:
        if _is_watch(answer.url) and answer.response.ok:
            self._taken[answer.url.path] = self._clock()
        elif answer.url.path in self._taken and answer.response.status == NOT_FOUND:
            self.vanished.set()
            await asyncio.Event().wait()


def _is_watch(url: URL) -> bool:
    return url.query.get("watch") == "true"
