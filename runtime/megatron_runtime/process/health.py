"""Probes and metrics over HTTP for processes without a web framework: coordinator, engine and operator.

    GET /livez    200, or 503 if the process detects that it hangs; also at /healthz
    GET /readyz   200 when the process is ready, otherwise 503 with the missing conditions
    GET /metrics  the Prometheus registry

The server runs on the caller's event loop, so a blocked loop fails its liveness probe. Any host that reaches the port
may use it. The server therefore answers probes regardless of how many connections are open:

- If the request has arrived when the server accepts its connection, the server answers it immediately. Each iteration
  of the event loop accepts BATCH connections, in the order in which the kernel has accepted them.
- A connection without a complete request waits. If there are more than MAX_CONNECTIONS connections, or more than
  MAX_PER_PEER from one address, a new connection replaces the oldest connection.
- A thread renders the metrics. One rendering answers all requests that wait for metrics. A pause after each rendering
  limits the CPU time of the thread, because the thread and the event loop share the interpreter.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from megatron_runtime.process.listening import EVERY_ADDRESS, listening_socket
from megatron_runtime.protocol import strict_json as json

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
REQUEST_TIMEOUT_SECONDS = 5.0
"""Timeout for receiving a request, and for the client to read the answer."""
MAX_CONNECTIONS = 256
MAX_PER_PEER = 64
"""Maximum number of concurrent connections from one address."""
BACKLOG = 1024
BATCH = 32
"""Maximum number of connections that one iteration of the event loop accepts, which takes about 1 ms."""
MAX_SCRAPES = 16
"""Maximum number of requests that wait for metrics. Further requests get 503."""
RENDERING_SHARE = 0.1
"""Maximum fraction of one CPU that is used for rendering metrics."""
_RETRY_SECONDS = 0.1
_UNAVAILABLE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_REQUEST = re.compile(
    rb"(?P<method>%b) (?P<target>/[!-~]*) HTTP/1\.(?P<minor>[0-9])\r\n(?P<headers>(?:%b:[^\0\r\n]*\r\n)*)\r\n"
    % (_TOKEN, _TOKEN)
)

Body = Mapping[str, object] | bytes


@dataclass(kw_only=True, eq=False, repr=False)
class HealthServer:
    """A server that answers probes on one listening socket.

    missing:  returns the conditions that the process still needs to be ready, one phrase each. Called for each probe.
    liveness: returns the content of /livez. The field `alive` of the content determines the HTTP status.
    registry: metrics to expose. The registry's collectors run on a thread. If None, /metrics answers 404.
    pages:    for each further path, a function that returns the content of the page, or None for the HTTP status 503.
    port:     the port in use. If the port is 0, start() replaces it by a free port.
    """

    missing: Callable[[], Sequence[str]]
    liveness: Callable[[], Mapping[str, object]] = lambda: {"alive": True}
    registry: CollectorRegistry | None = None
    pages: Mapping[str, Callable[[], Mapping[str, object] | None]] = field(default_factory=dict)
    host: str = EVERY_ADDRESS
    port: int = 8080

    def __post_init__(self) -> None:
        self._listener: socket.socket | None = None
        self._open: dict[_Connection, None] = {}
        """Open connections, the oldest first."""
        self._metrics = MetricsPage(self.registry) if self.registry is not None else None

    async def start(self) -> None:
        """Bind the port and answer probes. Raises OSError with the address and the remedy if the address is in use."""
        try:
            listener = listening_socket(self.host, self.port, backlog=BACKLOG)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            message = f"cannot bind {self.host}:{self.port} ({reason}): choose another --health-port"
            raise OSError(error.errno, message) from error
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._accept)

    async def stop(self) -> None:
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self._open):
            connection.close()
        if self._metrics is not None:
            await self._metrics.close()

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._listener is None:
                return
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _UNAVAILABLE:
                    self._pause_accepting()
                    return
                continue  # the peer has already closed the connection
            peer = address[0]
            of_peer = [connection for connection in self._open if connection.peer == peer]
            if len(of_peer) >= MAX_PER_PEER:
                of_peer[0].close()
            elif len(self._open) >= MAX_CONNECTIONS:
                next(iter(self._open)).close()
            connection = _Connection(self, accepted, peer, self._loop)
            self._open[connection] = None
            connection.read()

    def _pause_accepting(self) -> None:
        """Close the connections, and pause accepting new ones, because the process has run out of file descriptors."""
        for connection in list(self._open):
            connection.close()

        def resume() -> None:
            if self._listener is not None:
                self._loop.add_reader(self._listener, self._accept)

        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY_SECONDS, resume)

    def closed(self, connection: _Connection) -> None:
        self._open.pop(connection, None)

    def answer(self, connection: _Connection, request: bytes) -> None:
        """Answer a request now or, if it is for /metrics, after the metrics have been rendered.

        request: bytes up to the empty line.
        """
        match = _REQUEST.fullmatch(request)
        if match is None or not _is_well_framed(match):
            connection.send(_response(HTTPStatus.BAD_REQUEST, {"error": "expected a request of HTTP/1.1"}))
            return
        connection.is_head = match["method"] == b"HEAD"
        if match["method"] not in (b"GET", b"HEAD"):
            content: Body = {"error": "method not allowed: use GET or HEAD"}
            connection.send(_response(HTTPStatus.METHOD_NOT_ALLOWED, content, "Allow: GET, HEAD\r\n"))
            return
        path = match["target"].split(b"?", 1)[0]
        if (page := self.pages.get(path.decode())) is not None:
            values = page()
            connection.send(_response(_status(values is not None), values or {}))
            return
        match path:
            case b"/livez" | b"/healthz":
                content = self.liveness()
                connection.send(_response(_status(bool(content["alive"])), content))
            case b"/readyz":
                missing = list(self.missing())
                connection.send(_response(_status(not missing), {"ready": not missing, "missing": missing}))
            case b"/metrics" if self._metrics is not None:
                self._scrape(connection, self._metrics)
            case _:
                content = {"error": "not found; try /livez, /readyz or /metrics"}
                connection.send(_response(HTTPStatus.NOT_FOUND, content))

    def _scrape(self, connection: _Connection, page: MetricsPage) -> None:
        text = page.request()
        if text is None:
            content = {"error": f"{MAX_SCRAPES} requests wait for metrics: try again"}
            connection.send(_response(HTTPStatus.SERVICE_UNAVAILABLE, content, "Retry-After: 1\r\n"))
            return
        self._open[connection] = self._open.pop(connection)  # the connection is no longer the oldest
        connection.scrape = text

        def answer(rendered: asyncio.Future[bytes]) -> None:
            if rendered.cancelled() or connection not in self._open:
                return
            if rendered.exception() is not None:
                response = _response(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "metrics cannot be rendered"})
            else:
                response = _response(HTTPStatus.OK, rendered.result())
            connection.send(response)

        text.add_done_callback(answer)


class MetricsPage:
    """Renders the metrics of a registry in a thread. One rendering answers all requests that wait."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._waiting: list[asyncio.Future[bytes]] = []
        self._rendering: asyncio.Task[None] | None = None

    def request(self) -> asyncio.Future[bytes] | None:
        """Return a future for the text of /metrics, or None if too many requests wait.

        Cancel the future if the text is no longer needed.
        """
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= MAX_SCRAPES:
            return None
        loop = asyncio.get_running_loop()
        self._waiting.append(loop.create_future())
        if self._rendering is None:
            self._rendering = loop.create_task(self._render())
        return self._waiting[-1]

    async def close(self) -> None:
        if self._rendering is not None:
            self._rendering.cancel()
            await asyncio.gather(self._rendering, return_exceptions=True)

    async def _render(self) -> None:
        """Render the registry repeatedly until no request waits."""
        try:
            while self._waiting:
                served, self._waiting = self._waiting, []
                text, seconds, failure = b"", 0.0, None
                try:
                    text, seconds = await asyncio.to_thread(_rendered, self._registry)
                except Exception as error:
                    logger.exception("metrics cannot be rendered")
                    failure = error
                for future in served:
                    if future.done():
                        continue
                    if failure is None:
                        future.set_result(text)
                    else:
                        future.set_exception(failure)
                await asyncio.sleep(seconds * (1 / RENDERING_SHARE - 1))
        finally:
            self._rendering = None


def serve_on_thread(server: HealthServer) -> Callable[[], None]:
    """Start `server` on a new thread. Return a function that stops the server and the thread. Raises OSError like
    start().

    This function may be called on an event loop, which it blocks until the server listens.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="probes", daemon=True)
    thread.start()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    except BaseException:
        stop()
        raise
    return stop


class _Connection:
    """One request and its answer, on a non-blocking socket."""

    def __init__(
        self, server: HealthServer, accepted: socket.socket, peer: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        accepted.setblocking(False)
        self.peer = peer
        self.is_head = False
        self.scrape: asyncio.Future[bytes] | None = None
        self._server = server
        self._socket = accepted
        self._loop = loop
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._deadline = loop.call_later(REQUEST_TIMEOUT_SECONDS, self.close)
        self._is_reading = self._is_writing = False

    def read(self) -> None:
        """Read the data that has arrived. Answer if the request is complete, otherwise wait for more data."""
        try:
            data = self._socket.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            if not self._is_reading:
                self._is_reading = True
                self._loop.add_reader(self._socket, self.read)
            return
        except OSError:
            data = b""
        self._received += data
        end = self._received.find(b"\r\n\r\n", max(0, len(self._received) - len(data) - 3))
        if 0 <= end <= MAX_REQUEST_BYTES:
            self._stop_reading()
            self._server.answer(self, bytes(self._received[: end + 4]))
        elif not data or len(self._received) > MAX_REQUEST_BYTES:
            self.close()
        elif not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._socket, self.read)

    def send(self, response: tuple[bytes, bytes]) -> None:
        """Send header and body, and close the connection."""
        header, body = response
        self._unsent = memoryview(header if self.is_head else header + body)
        self._deadline.cancel()
        self._deadline = self._loop.call_later(REQUEST_TIMEOUT_SECONDS, self.close)
        self._write()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if not self._unsent:
            self.close()
        elif not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._socket, self._write)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """Close the connection. This method is idempotent."""
        self._stop_reading()
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._socket)
        self._deadline.cancel()
        if self.scrape is not None:
            self.scrape.cancel()
        self._socket.close()
        self._server.closed(self)


def _rendered(registry: CollectorRegistry) -> tuple[bytes, float]:
    """Return the rendered metrics, and the CPU seconds that the rendering took."""
    began = time.thread_time()
    return generate_latest(registry), time.thread_time() - began


def _is_well_framed(request: re.Match[bytes]) -> bool:
    """Return whether the request has exactly one Host header, as HTTP/1.1 requires, and at most one body length."""
    names = [line.partition(b":")[0].lower() for line in request["headers"].split(b"\r\n")]
    hosts = names.count(b"host")
    return (
        hosts <= 1
        and (hosts == 1 or request["minor"] == b"0")
        and not {
            b"content-length",
            b"transfer-encoding",
        }
        <= set(names)
    )


def _status(is_good: bool) -> HTTPStatus:
    return HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE


def _response(status: HTTPStatus, content: Body, more: str = "") -> tuple[bytes, bytes]:
    """Return the header and the body of a response.

    content: the text of the metrics as bytes, or a value that is sent as JSON.
    more:    additional header lines.
    """
    if isinstance(content, bytes):
        content_type, body = CONTENT_TYPE_LATEST, content
    else:
        content_type, body = "application/json", json.dumps(content).encode() + b"\n"
    header = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return header.encode(), body
