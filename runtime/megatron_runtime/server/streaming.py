"""Server-sent events, and cancellation of work when the client disconnects or the drain time ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron_runtime.server.errors import ApiError, try_again
from megatron_runtime.server.json_text import to_json

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_SEPARATORS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""JSON escapes of the characters beyond ASCII at which line readers of several languages end a line."""

_T = TypeVar("_T")


class ClientDisconnectedError(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Awaitable[_T], *, expired: asyncio.Event) -> _T:
    """Return the result of `work`. Cancel `work` when the client disconnects or `expired` is set.

    receive: ASGI `receive` of the request. expired: set when the drain time has ended.

    Raises ClientDisconnectedError if the client has disconnected, and ApiError 503 if `expired` is set.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.create_task(_disconnected(receive))
    over = asyncio.create_task(expired.wait())
    try:
        await asyncio.wait({task, left, over}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if left.done():
            raise ClientDisconnectedError
        raise try_again(503, "The server is shutting down: try again.", code="shutting_down")
    finally:
        await cancel(task, left, over)


class WholeAnswer(Response):
    """A response that sends a whole answer in parts.

    The response sends a part only after the client has read most of the earlier parts. Therefore the request stays
    open, and its memory counts towards the server's memory limit, until the client has read the answer.
    """

    PART_BYTES = 64 * 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, max(1, len(body)), self.PART_BYTES):
            part = bytes(body[start : start + self.PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": start + len(part) < len(body)})


class EventStream(Response):
    """A stream of server-sent events.

    Nothing is sent before the first event, so that a rejected request gets the HTTP status of its error. A stream
    without an event for `keep_alive_seconds` gets a comment. After the first byte, an ApiError becomes an error event,
    without a DONE after it, because the answer is not complete. When the client disconnects, `events` is closed
    immediately. When `expired` is set, the stream ends with an error. The name of an event is its `type`, if any.

    error_events: for APIs whose streams have no DONE, returns the last events of a stream that fails. None: the format
                  of OpenAI's completions.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        *,
        keep_alive_seconds: float,
        expired: asyncio.Event,
        error_events: Callable[[ApiError], Sequence[dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_events = error_events
        self._keep_alive_seconds = keep_alive_seconds
        self._expired = expired
        self._is_started = False
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            try:
                await until_disconnect(receive, self._send_events(send), expired=self._expired)
            finally:
                await cancel(alive)
        except ClientDisconnectedError:
            return
        except Exception as error:
            if not self._is_started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("a stream failed after it had begun")
                error = ApiError(500, "The server failed while it generated the answer.", code="internal_error")
            last = [error.body()] if self._error_events is None else self._error_events(error)
            await self._write(send, b"".join(map(self._encoded, last)), is_last=True)
        else:
            await self._write(send, DONE if self._error_events is None else b"", is_last=True)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._write(send, self._encoded(event))

    def _encoded(self, event: dict[str, Any]) -> bytes:
        data = to_json(event)
        for separator, escape in _SEPARATORS.items():
            data = data.replace(separator, escape)
        name = f"event: {event['type']}\n".encode() if "type" in event else b""
        return name + b"data: " + data + b"\n\n"

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent = time.monotonic() - self._last_sent
            if silent >= self._keep_alive_seconds:
                await self._write(send, KEEP_ALIVE)
                silent = 0.0
            await asyncio.sleep(self._keep_alive_seconds - silent)

    async def _write(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        self._last_sent = time.monotonic()
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
