"""Around every request: count it, and close kept-alive connections while the server drains."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime.server.connections import MAX_HEADERS
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.service import Service


class ObserveMiddleware:
    """Counts open requests and answers by route and status."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route template, never the path: a scanner must not create metrics without end.
                route = getattr(scope.get("route"), "path", "unknown")
                self._service.metrics.responses.labels(route, str(message["status"])).inc()
                if self._service.draining:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        state = scope.setdefault("state", {})
        with self._service.serving(state):
            if len(scope["headers"]) > MAX_HEADERS:
                message = f"The request has more than {MAX_HEADERS} headers: send fewer."
                refused = ApiError(431, message, code="headers_too_large").response()
                await refused(scope, receive, observed)
            else:
                await self._app(scope, receive, observed)
