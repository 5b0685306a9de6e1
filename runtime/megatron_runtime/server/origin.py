"""Requests that a web page makes a browser send: which Host, Origin and Content-Type are accepted.

A page of any site can post text to a server on loopback, and a name of its own can be made to resolve to 127.0.0.1
(DNS rebinding). A JSON content type needs a CORS preflight, which the server never answers; Host and Origin name the
site.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_runtime.server.errors import ApiError, shown

_JSON_TYPE = re.compile(r"application/(?:json|[\w.!#$&^-]+\+json)", re.ASCII)
_CHARSET = re.compile(r"""charset\s*=\s*"?([^";\s]+)"?""", re.IGNORECASE)


def check_content_type(headers: Headers) -> None:
    """Raise ApiError 415 for a body that is not declared as JSON in UTF-8, or that is compressed."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding {shown(encoding)} is not supported: send the body uncompressed."
        raise ApiError(415, message, code="unsupported_content_encoding")
    given = headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    charset = _CHARSET.search(parameters)
    if _JSON_TYPE.fullmatch(kind.strip().lower()) is None or (
        charset is not None and charset[1].lower() not in ("utf-8", "utf8")
    ):
        found = f"not {shown(given)}" if given else "which the request does not have"
        message = f"The body must be JSON: send the header 'Content-Type: application/json', {found}."
        raise ApiError(415, message, code="unsupported_content_type")


class HostMiddleware:
    """Accepts only requests for the allowed hosts, and from a browser only those of the server's own pages.

    allowed: names and addresses without ports, IPv6 addresses without brackets.
    """

    def __init__(self, app: ASGIApp, *, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = frozenset(host.lower().strip("[]") for host in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        authority = headers.get("host", "").lower()
        if _host_of(authority) not in self._allowed:
            message = (
                f"Host {shown(authority)} is not served here: use {', '.join(sorted(self._allowed))}, or start the "
                "server with --allowed-host and this name."
            )
            return ApiError(403, message, code="host_not_allowed")
        for origin in headers.getlist("origin"):
            if _authority_of(origin) != authority:
                message = f"Web pages of origin {shown(origin)} may not use this server: only its own page may."
                return ApiError(403, message, code="origin_not_allowed")
        return None


def _host_of(authority: str) -> str:
    """`[::1]:8000` as `::1`."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def _authority_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
