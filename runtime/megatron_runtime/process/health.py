"""Probes and metrics over HTTP for processes without a web framework: the coordinator and the engine.

    GET /livez    200; the server runs on the caller's event loop, so a blocked loop fails its liveness probe
    GET /readyz   200 when the process is ready, else 503 with the missing conditions
    GET /metrics  the Prometheus registry

No torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from megatron_runtime.process.listening import EVERY_ADDRESS, listening_socket
from megatron_runtime.protocol import strict_json as json

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
REQUEST_TIMEOUT_SECONDS = 5.0
MAX_CONNECTIONS = 128
"""Concurrent connections; the server closes further ones."""


@dataclass(kw_only=True, eq=False, repr=False)
class HealthServer:
    """Answers probes on one listening socket.

    missing:  returns the conditions that the process needs to be ready, one phrase each. Called for each probe.
    registry: metrics to expose; None answers 404.
    port:     the port in use; for port 0, known after start().
    """

    missing: Callable[[], Sequence[str]]
    registry: CollectorRegistry | None = None
    host: str = EVERY_ADDRESS
    port: int = 8080

    def __post_init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self) -> None:
        """Bind and answer probes. Raises OSError with the address and the remedy if the address is in use."""
        try:
            listener = listening_socket(self.host, self.port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            message = f"cannot bind {self.host}:{self.port} ({reason}): choose another --health-port"
            raise OSError(error.errno, message) from error
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_REQUEST_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_SECONDS)
            writer.transport.set_write_buffer_limits(0)  # drain() waits until everything is sent
            writer.write(self._answer(request))
            await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            logger.debug("probe connection ended without a request: %r", error)
            writer.transport.abort()
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split()
        status, content = self._route(words)
        if isinstance(content, bytes):
            content_type, body = CONTENT_TYPE_LATEST, content
        else:
            content_type, body = "application/json", json.dumps(content).encode() + b"\n"
        header = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return header.encode() + (b"" if words[:1] == [b"HEAD"] else body)

    def _route(self, words: list[bytes]) -> tuple[HTTPStatus, dict[str, object] | bytes]:
        """Return the status and the content for the words of the request line; bytes are metrics."""
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HTTPStatus.BAD_REQUEST, {"error": "expected an HTTP/1.x request line"}
        if words[0] not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, {"error": "method not allowed: use GET or HEAD"}
        match words[1].split(b"?", 1)[0]:
            case b"/livez":
                return HTTPStatus.OK, {"alive": True}
            case b"/readyz":
                missing = list(self.missing())
                status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
                return status, {"ready": not missing, "missing": missing}
            case b"/metrics" if self.registry is not None:
                return HTTPStatus.OK, generate_latest(self.registry)
        return HTTPStatus.NOT_FOUND, {"error": "not found; try /livez, /readyz or /metrics"}
