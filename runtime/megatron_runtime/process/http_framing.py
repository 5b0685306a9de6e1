"""uvicorn's protocol for HTTP/1.1, with requests framed as RFC 9112 requires. Imports no torch.

h11 parses the requests. This module also rejects requests that h11 accepts but the RFC does not allow.

If a proxy and this server see different boundaries between requests, a client can smuggle a request into another
client's connection. The server therefore answers each request whose boundaries are ambiguous with an error, and closes
the connection.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 * 1024
"""Maximum size of request line and headers. Up to one further chunk is read before the limit is checked."""

_FOLDED_LINE = re.compile(rb"\n[ \t]")
_CODINGS = re.compile(rb"^transfer-encoding:(.*)$", re.IGNORECASE | re.MULTILINE)
_HOST = re.compile(
    rb"""(?:
        \[(?:[0-9A-Fa-f:.]+|v[0-9A-Fa-f]+\.[-\w.~!$&'()*+,;=:]+)\]
        | (?:[-\w.~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*
    )(?::[0-9]*)?""",
    re.VERBOSE,
)
"""Matches a Host header: uri-host [ ":" port ] of RFC 3986, section 3.2."""
_ABSOLUTE_FORM = re.compile(rb"https?://(?P<authority>[^/?#]+)(?P<path>[^#]*)", re.IGNORECASE)


class FramingError(Exception):
    """The request is not valid HTTP/1.1.

    status: HTTP status of the answer, after which the server closes the connection.
    """

    def __init__(self, status: int, message: str = "The request is not valid HTTP/1.1.") -> None:
        super().__init__(message)
        self.status = status


class RequestParser(h11.Connection):
    """The server side of an HTTP connection. next_event() raises FramingError instead of h11's errors."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        received = b""
        if self.their_state is h11.IDLE:
            received, _ = self.trailing_data
            if received.startswith(b"\r\n"):
                self._receive_buffer.maybe_extract_at_most(2)  # section 2.2: one empty line before a request is ignored
                received = received[2:]
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise FramingError(_status(error, received)) from error
        if not isinstance(event, h11.Request):
            return event
        return _checked(event, head=received[: len(received) - len(self._receive_buffer)])


class HttpProtocol(H11Protocol):
    """A connection of uvicorn, for `uvicorn.Config(http=HttpProtocol, ws="none")`.

    It does not log malformed requests and Upgrade headers as warnings, because any client can send them.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # those of uvicorn
        self.conn = RequestParser()

    def handle_events(self) -> None:
        """Handle the events that h11 has parsed."""
        try:
            super().handle_events()
        except FramingError as error:
            logger.debug("malformed request: %s", error)
            self.reject(error)

    def reject(self, error: FramingError) -> None:
        """Answer a malformed request and close the connection.

        If a response has already begun, only close the connection.
        """
        self.answer(error.status, str(error).encode(), {"content-type": "text/plain; charset=utf-8"})
        self.transport.close()

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Write a response in place of the application's response, unless the application has begun its response."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            length = {"content-length": str(len(body)), "connection": "close"}
            fields = [(name.encode(), value.encode()) for name, value in {**headers, **length}.items()]
            response = h11.Response(status_code=status, headers=fields, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _should_upgrade(self) -> bool:
        """Return False, because no other protocol is offered. The Upgrade header is ignored (RFC 9110, section 7.8)."""
        return False


def _status(error: h11.RemoteProtocolError, received: bytes) -> int:
    """Return the HTTP status for an error of h11.

    For any Transfer-Encoding other than "chunked", h11 suggests 501. This function returns 400 instead if the
    Transfer-Encoding does not determine the length of the body.
    """
    if error.error_status_hint != 501:
        return error.error_status_hint
    head = re.split(rb"\n\r?\n", received, maxsplit=1)[0]
    codings = [coding.strip().lower() for value in _CODINGS.findall(head) for coding in value.split(b",")]
    # Section 6.3: the body's length is unknown unless the last coding, and no other, is chunked.
    is_delimited = codings[-1:] == [b"chunked"] and codings.count(b"chunked") == 1 and not _FOLDED_LINE.search(head)
    return 501 if is_delimited else 400


def _checked(request: h11.Request, *, head: bytes) -> h11.Request:
    """Return the request with its target in origin form. Raises FramingError if the request is malformed.

    head: bytes of the request line and the headers.
    """
    version, headers = request.http_version, dict(request.headers)
    if not version.startswith(b"1."):
        raise FramingError(505, "This server speaks HTTP/1.1.")
    if _FOLDED_LINE.search(head):
        raise FramingError(400, "A header continues on a second line: write it on one line.")
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            raise FramingError(400, "The request has Content-Length and Transfer-Encoding: send one of them.")
        if version < b"1.1":
            raise FramingError(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length.")
    host = headers.get(b"host")
    if host is None and version >= b"1.1":
        raise FramingError(400, "The Host header is missing.")
    if host is not None and not _HOST.fullmatch(host):
        raise FramingError(400, "The Host header is not HOST or HOST:PORT.")
    return _in_origin_form(request)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return the request in origin form: an absolute target becomes a Host header and a path (RFC 9112, section
    3.2).
    """
    target = request.target
    if request.method == b"CONNECT":
        raise FramingError(501, "This server is not a proxy: it does not implement CONNECT.")
    if (target.startswith(b"/") and b"#" not in target) or (target == b"*" and request.method == b"OPTIONS"):
        return request
    absolute = _ABSOLUTE_FORM.fullmatch(target)
    if absolute is None or not _HOST.fullmatch(absolute["authority"]):
        raise FramingError(400, "The target of the request is neither a path nor an http URL.")
    path = absolute["path"]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", absolute["authority"]), *(item for item in request.headers if item[0] != b"host")],
        http_version=request.http_version,
    )
