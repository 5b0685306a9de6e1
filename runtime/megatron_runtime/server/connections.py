"""HTTP connections with deadlines, and a limit for their number.

uvicorn has only a keep-alive timeout. `HttpConnection` adds the limits that protect a server from hostile clients: a
client cannot hold a connection without making progress. Twice per second, the server calls sweep() of all connections
to check their deadlines.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import h11

from megatron_runtime.process.http_framing import MAX_HEADER_BYTES, FramingError, HttpProtocol
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.errors import ApiError, try_again
from megatron_runtime.server.settings import ConnectionLimits

MAX_HEADERS = 128

_SLICE_BYTES = 4 * 1024
_PARSE_SECONDS = 0.0005
"""Maximum parsing time for one connection in seconds, before the next connection is parsed."""
_TURN_SECONDS = 0.01
"""Maximum parsing time for all waiting connections in one iteration of the event loop, in seconds."""
_LINGER_SECONDS = 2.0
"""How long the server reads and drops data from the client after an answer that ends the connection early, in seconds.
If the server closed the connection immediately, the kernel would reset it, and the client could lose the answer.
"""


class ParseQueue:
    """A queue of connections whose received bytes take long to parse.

    The event loop parses the connections round robin, and runs other tasks between two connections.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def add(self, parse: Callable[[], None]) -> None:
        """Call `parse` in a later iteration of the event loop."""
        self._waiting.append(parse)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        ends = time.perf_counter() + _TURN_SECONDS
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()()
                if time.perf_counter() > ends:
                    break
        finally:
            self._schedule()


class HttpConnection(HttpProtocol):
    """One HTTP connection, with deadlines for receiving the headers and the body of a request, and for sending the
    answer.

    parse_queue: shared by all connections of a server.
    """

    def __init__(self, *, limits: ConnectionLimits, parse_queue: ParseQueue, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._parse_queue = parse_queue
        self._since = self._last_received = self.loop.time()
        self._stalled_since: float | None = None
        self._rejected_at: float | None = None
        self._backlog = bytearray()
        self._is_parsing_later = False
        self._phase: tuple[str, object] = ("headers", None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self._limits.max_connections:
            return
        others = (other for other in self.connections if isinstance(other, HttpConnection) and other is not self)
        idle = [other for other in others if other.is_evictable]
        if idle:
            min(idle, key=lambda other: other._last_received).transport.abort()
        else:
            message = f"This server has {self._limits.max_connections} connections open: try again."
            self._reject(try_again(503, message, code="too_many_connections"))
            self.transport.close()

    @property
    def is_evictable(self) -> bool:
        """Whether the connection can be closed, because no request is in progress.

        A part of the next request's headers may already have arrived.
        """
        return self.conn.their_state is h11.IDLE and self._rejected_at is None and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self._last_received = self.loop.time()
        self._backlog += data
        if self._is_parsing_later:
            self.transport.pause_reading()  # uvicorn may have resumed reading
        elif self._parse_queue.is_busy and self.conn.their_state is h11.SEND_BODY:
            self._parse_later()
        else:
            self._parse()

    def _parse_later(self) -> None:
        self._is_parsing_later = True
        self.transport.pause_reading()
        self._parse_queue.add(self._parse)

    def _parse(self) -> None:
        """Parse the received bytes. If parsing takes long, continue after the event loop has served other connections.

        h11 gets slices of the bytes, because it checks the size of headers only while they are incomplete.
        """
        self._is_parsing_later = False
        began = time.perf_counter()
        while self._backlog and self._rejected_at is None and not self.transport.is_closing():
            if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
                break  # data after a request with Connection: close is ignored
            part = bytes(self._backlog[:_SLICE_BYTES])
            del self._backlog[:_SLICE_BYTES]
            super().data_received(part)
            if self._backlog and time.perf_counter() - began > _PARSE_SECONDS and not self.transport.is_closing():
                self._parse_later()
                return
        self._backlog.clear()
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def reject(self, error: FramingError) -> None:
        if error.status == 431:
            message = f"The request line and headers are larger than {MAX_HEADER_BYTES} bytes: shorten them."
            self._reject(ApiError(431, message, code="headers_too_large"))
        else:
            self._reject(ApiError(error.status, str(error), code="malformed_http"))

    def sweep(self, now: float) -> None:
        """Close the connection if a deadline has passed. now: time of the event loop, in seconds."""
        unsent = self.transport.get_write_buffer_size() > 0
        answered = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        if not self.flow.write_paused and not (unsent and answered):
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since > self._limits.stall_seconds:
            self.transport.abort()
        if self.transport.is_closing():
            return
        if self._rejected_at is not None:
            if now - self._rejected_at > _LINGER_SECONDS:
                self.transport.close()
            return
        phase = (self._awaited(), self.cycle)
        if phase != self._phase:
            self._phase, self._since = phase, now
        if phase[0] == "headers" and now - self._since > self._limits.header_seconds:
            self._time_out("headers", self._limits.header_seconds)
        elif phase[0] == "body" and now - self._since > self._limits.body_seconds:
            self._time_out("body", self._limits.body_seconds)
        elif phase[0] == "body" and (self.flow.read_paused or self._is_parsing_later):
            self._last_received = now
        elif phase[0] == "body" and now - self._last_received > self._limits.body_idle_seconds:
            self._time_out("next part of the body", self._limits.body_idle_seconds)

    def _awaited(self) -> str:
        """Return what the client must send now: "headers", "body", or "" if the server waits for nothing.

        The result is "" while the client waits for an answer, and between two requests.
        """
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        is_idle = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        return "headers" if is_idle else ""

    def _time_out(self, what: str, seconds: float) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # no request has started
            return
        self._reject(ApiError(408, f"The {what} did not come within {seconds:g} s.", code="request_timeout"))

    def _reject(self, error: ApiError) -> None:
        """Send `error` unless an answer has already begun. In both cases, close the connection afterwards."""
        body = json.dumps(error.body()).encode()
        self.answer(error.status, body, {"content-type": "application/json", **error.headers})
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._rejected_at = self.loop.time()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
