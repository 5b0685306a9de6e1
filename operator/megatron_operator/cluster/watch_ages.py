"""Records for each watch when the API server last accepted it, and why the API server rejects it.

The API server ends every watch after `watch_seconds`. The operator or kopf then starts the next watch at the last seen
version. A watch that is not renewed in time is dead, for example because a proxy dropped its connection or the operator
stopped watching. A watch that the API server rejects is denied, because a permission, the namespace or the kind is
missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import aiohttp
from yarl import URL

from megatron_operator.resource.names import PLURAL

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Margin that lets the server end a watch before the client does."""
DENIED_SECONDS = 4.0
"""A watch that the server has rejected for this long is denied. A starting API server rejects watches for a moment."""
RETRY_SECONDS = (0.5, 1.0, 3.0, 5.0)
"""Pauses between tries of a rejected watch."""

FORBIDDEN, NOT_FOUND = 403, 404

Watched = tuple[str, str]
"""Name of the API resource, such as `pods`, and the namespace, which is empty for all namespaces."""


class WatchAges:
    """The time at which each watch was last accepted, and the error of each rejected watch, by the collection's path.

    For a watch that was never accepted, the time of its first request is stored.
    """

    def __init__(self, *, watch_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._due = watch_seconds + GRACE_SECONDS
        self._clock = clock
        self._started: dict[str, float] = {}
        self._rejected: dict[str, tuple[float, str]] = {}
        """For each path that is now rejected, the time of its first rejection and the last answer."""
        self.vanished = asyncio.Event()
        """Set when the API server no longer serves a kind that kopf watches, so that kopf must be stopped."""

    @property
    def silent_seconds(self) -> float:
        """How long the renewal of the oldest watch is overdue, in seconds; 0 if no renewal is overdue.

        Denied watches are ignored.
        """
        oldest = min((at for path, at in self._started.items() if path not in self._rejected), default=None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest - self._due)

    @property
    def denied(self) -> Mapping[Watched, str]:
        """The watches that the API server rejects, with the reason for each."""
        before = self._clock() - DENIED_SECONDS
        rejected = list(self._rejected.items())  # metrics read it on another thread
        return {watched(path): error for path, (since, error) in rejected if since <= before}

    def asked(self, path: str) -> None:
        """Record that a watch was requested.

        If the watch is never accepted, its age is measured from its first request.
        """
        self._started.setdefault(path, self._clock())

    def accepted(self, path: str) -> None:
        self._started[path] = self._clock()
        if self._rejected.pop(path, None) is not None:
            logger.info("watched again", extra={"path": path})

    def rejected(self, path: str, error: str) -> None:
        """Record that the API server rejected a list or watch request with `error`."""
        if path not in self._rejected:
            logger.warning("cannot be watched", extra={"path": path, "error": error})
        since, _ = self._rejected.get(path, (self._clock(), ""))
        self._rejected[path] = (since, error)

    def trace(self) -> aiohttp.TraceConfig:
        """Return a trace configuration that reports the requests of kopf's session to this object.

        kopf exits if it may not list the resources of one namespace. This object therefore replaces such a rejection by
        a connection error, because kopf retries after connection errors.
        """
        config = aiohttp.TraceConfig()
        config.on_request_start.append(self._asked)
        config.on_request_end.append(self._answered)
        return config

    async def _answered(self, _: aiohttp.ClientSession, __: object, answer: aiohttp.TraceRequestEndParams) -> None:
        path, response = answer.url.path, answer.response
        if response.ok and (_is_watch(answer.url) or path in self._rejected):
            self.accepted(path)
        elif response.status == NOT_FOUND and path in self._started:
            self.vanished.set()
            await asyncio.Event().wait()
        elif response.status == FORBIDDEN and path.endswith(f"/{PLURAL}"):
            self.rejected(path, f"{response.status} {response.reason}")
            response.close()
            await asyncio.sleep(RETRY_SECONDS[1])
            raise DeniedError(f"GET {path}: {response.status} {response.reason}")

    async def _asked(self, _: aiohttp.ClientSession, __: object, request: aiohttp.TraceRequestStartParams) -> None:
        if _is_watch(request.url):
            self.asked(request.url.path)


class DeniedError(aiohttp.ClientConnectionError):
    """The server does not allow this operator to list or watch a collection."""


def watched(path: str) -> Watched:
    """Return the kind and the namespace of the collection at `path`."""
    *_, scope, namespace, plural = ["", *path.split("/")]
    return (plural, namespace) if scope == "namespaces" else (plural, "")


def _is_watch(url: URL) -> bool:
    return url.query.get("watch") == "true"
