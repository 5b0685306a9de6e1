"""Checks of a request before its body is parsed: Host, Origin, Content-Type, and the structure of the JSON.

A web page of any site can post plain text to a server on loopback, and a host name of the site can resolve to 127.0.0.1
(DNS rebinding). The server therefore accepts only JSON, for which browsers first send a CORS preflight request. The
server grants preflight requests only to allowed origins. The headers Host and Origin identify the site of the page.

A parser converts each byte pair `[]` to an object of 56 bytes, and validation reports each invalid element. Parsing a
body within the size limit can therefore take seconds and gigabytes. `JsonScan` counts the elements of a body before the
body is parsed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from megatron_runtime.server.errors import ApiError, shown
from megatron_runtime.server.json_text import from_json

MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
"""Maximum number of objects and arrays in a body, and maximum number of members of all objects in a body."""
MAX_ELEMENTS = 1 << 20
"""Maximum number of values that are followed by a comma. Only a prompt of token ids has nearly this number."""

_OTHER = bytes(set(range(256)) - set(b"[]{}"))
_ONE_BRACKET = bytes.maketrans(b"]{}", b"[[[")
_CONTAINER_BYTES, _MEMBER_BYTES, _ELEMENT_BYTES = 512, 100, 40
"""Bytes of memory for a validated object or array, for a member of an object, and for a number in a list."""
_STEPS = bytes.maketrans(b"[]{}", b"\x01\x00\x01\x00")
_PIECE_BYTES = 64 * 1024
_EXPOSED = "Retry-After, x-ignored-fields, x-ignored-keywords, x-request-id, x-should-retry"
_COMMON_HEADERS = "authorization, content-type, x-api-key, api-key, x-request-id, x-session-id"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2048}")
_JSON_TYPE = re.compile(r"application/(?:json|[\w.!#$&^-]+\+json)", re.ASCII)
_CHARSET = re.compile(r"""charset\s*=\s*"?([^";\s]+)"?""", re.IGNORECASE)


def check_content_type(headers: Headers) -> bool:
    """Return whether the body is compressed with gzip.

    Raises ApiError 415 if the body is not declared as JSON in UTF-8, or is compressed in another way.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        message = f"Content-Encoding {shown(encoding)} is not supported: use gzip, or send the body uncompressed."
        raise ApiError(415, message, code="unsupported_content_encoding")
    given = headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    charset = _CHARSET.search(parameters)
    if _JSON_TYPE.fullmatch(kind.strip().lower()) is None or (
        charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii")
    ):
        problem = f"not {shown(given)}" if given else "which the request does not have"
        message = f"The body must be JSON: send the header 'Content-Type: application/json', {problem}."
        raise ApiError(415, message, code="unsupported_content_type")
    return encoding in ("gzip", "x-gzip")


class Gunzip:
    """A decompressor for one gzip request body, which receives the body in chunks."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed chunks that `data` completes, each of at most 64 KiB.

        Raises ApiError 400 for invalid gzip data.
        """
        try:
            while data:
                yield self._stream.decompress(data, _PIECE_BYTES)
                data = self._stream.unconsumed_tail
        except zlib.error as error:
            raise ApiError(400, f"The request body is not valid gzip: {error}.", code="invalid_gzip") from error
        if self._stream.unused_data:
            raise ApiError(400, "The request body has data after its gzip stream: remove it.", code="invalid_gzip")

    def finish(self) -> None:
        """Raise ApiError 400 if the compressed body is incomplete."""
        if not self._stream.eof:
            raise ApiError(400, "The request body ends within its gzip stream: send all of it.", code="invalid_gzip")


def check_host(headers: Headers, allowed: Collection[str], origins: Origins) -> None:
    """Raise ApiError 403 if the Host is not allowed, or if a browser's Origin differs from the Host and is not allowed.

    A request of HTTP/1.0 may have no Host, because no browser sends such a request.

    allowed: names and addresses in lower case, without ports and brackets. Other addresses of loopback, and the address
             0.0.0.0, are also allowed.
    """
    authority = headers.get("host", "").lower()
    host = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    if "host" in headers and host.removesuffix(".") not in allowed and not _is_loopback(host):
        message = (
            f"Host {shown(authority)} is not served here: use {', '.join(sorted(allowed))}, or start the "
            "server with --allowed-host and this name."
        )
        raise ApiError(403, message, code="host_not_allowed")
    for origin in headers.getlist("origin"):
        if _authority_of(origin) != authority and not origins.allow(origin):
            message = (
                f"Web pages of origin {shown(origin)} may not use this server: only its own page may. Start the server "
                "with --allowed-origin and this origin."
            )
            raise ApiError(403, message, code="origin_not_allowed")


class Origins:
    """The origins of web pages that can use the server (CORS), from --allowed-origin. "*" allows all origins."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)

    def allow(self, origin: str) -> bool:
        return origin.lower() in self._allowed or "*" in self._allowed

    def headers(self, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers of the answer to a page from an allowed origin, or an empty list for any other
        request.
        """
        origin = request.get("origin")
        if origin is None or not self.allow(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

    def preflight(self, request: Headers) -> dict[str, str] | None:
        """Return the additional headers for the answer to a CORS preflight, or None if `request` is not a preflight."""
        origin, method = request.get("origin"), request.get("access-control-request-method")
        if origin is None or method is None or not self.allow(origin):
            return None
        wanted = request.get("access-control-request-headers", "")
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            "Access-Control-Allow-Headers": wanted if _HEADER_NAMES.fullmatch(wanted) else _COMMON_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        if request.get("access-control-request-private-network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return headers


def origin_of(text: str) -> str:
    """Return the origin in `text` in the format that browsers send. Raises ValueError if the text is not an origin."""
    parts = urlsplit(text)
    if text == "*" or (
        parts.scheme and parts.netloc and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    ):
        return text if text == "*" else f"{parts.scheme}://{parts.netloc}".lower()
    raise ValueError(f"{text!r} is not an origin: write scheme://host[:port], such as http://localhost:3000, or *")


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _authority_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


class JsonLimitError(ValueError):
    """The JSON has more structure than the server accepts. The message names the limit and the remedy."""


class NotJsonError(ValueError):
    """The text contains NaN or Infinity, so it is not JSON. pydantic's parser could accept it."""


class JsonScan:
    """Counts the elements of one request body, and limits their number and depth.

    JSON text in strings of the body counts towards the same limits.

    long_list: `longest_list` ignores lists of at most this length, which saves time.
    """

    def __init__(self, *, long_list: int = MAX_ELEMENTS) -> None:
        self.longest_list = 0
        """Number of elements in the longest list of numbers or texts so far, if it is greater than `long_list`.
        Otherwise 0.
        """
        self.long_list = long_list
        self._run = 0
        """Number of commas since the last bracket, without the commas between members of an object."""
        self._bytes = 0
        self._is_ascii = True
        self._containers = self._members = self._elements = self._depth = 0
        self._in_string = self._after_backslash = False

    def feed(self, chunk: bytes) -> None:
        """Count the elements in the next bytes of the body. Raises JsonLimitError or NotJsonError.

        This method detects NaN and Infinity. The parser detects all other malformed JSON later.
        """
        self._bytes += len(chunk)
        self._is_ascii = self._is_ascii and chunk.isascii() and b"\\u" not in chunk
        if self._after_backslash and chunk:
            chunk, self._after_backslash = chunk[1:], False
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._after_backslash = chunk.endswith(b"\\")
        parts = chunk.split(b'"')
        outside = b"".join(parts[int(self._in_string) :: 2])
        self._in_string ^= len(parts) % 2 == 0
        if outside:
            self._count(outside)

    def text(self, text: str, *, depth: int = 0) -> None:
        """Count the JSON text in a string of the body as if it were nested in the body.

        Raises JsonLimitError or NotJsonError.
        """
        self._depth, self._run, self._in_string, self._after_backslash = depth, 0, False, False
        self.feed(text.encode(errors="surrogatepass"))

    def _count(self, outside: bytes) -> None:
        if b"N" in outside or b"I" in outside:  # outside of strings, E is the only capital letter in JSON
            raise NotJsonError(
                "it has NaN, Infinity or another word with a capital letter outside of strings: give finite numbers, "
                "true, false or null"
            )
        brackets = outside.translate(_STEPS, _OTHER)
        self._containers += len(brackets)  # two brackets form one container
        self._members += outside.count(b":")
        commas = outside.count(b",")
        self._elements += commas
        self._count_runs(outside, commas, has_brackets=bool(brackets))
        if max(self._containers // 2, self._members) > MAX_CONTAINERS:
            raise JsonLimitError(
                f"it has more than {MAX_CONTAINERS} objects and arrays, or members: send a smaller body"
            )
        if self._elements > MAX_ELEMENTS:
            raise JsonLimitError(f"it has more than {MAX_ELEMENTS} elements: send a smaller body")
        depths = list(accumulate((1 if opens else -1 for opens in brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > MAX_DEPTH:
            raise JsonLimitError(f"it is nested deeper than {MAX_DEPTH} levels: flatten it")

    def _count_runs(self, outside: bytes, commas: int, *, has_brackets: bool) -> None:
        """Update the length of the longest list, by the number of commas between brackets.

        outside:      a part of the body without the content of its strings.
        commas:       number of commas in `outside`.
        has_brackets: whether `outside` has a bracket.
        """
        if not has_brackets:
            self._run += _separators(outside)
        elif self._run + commas < self.long_list:
            last = max(outside.rfind(b"]"), outside.rfind(b"}"), outside.rfind(b"["), outside.rfind(b"{"))
            self._run = _separators(outside[last:])
        else:
            first, *others = map(_separators, outside.translate(_ONE_BRACKET).split(b"["))
            longest = max(self._run + first, *others)
            if longest >= self.long_list:
                self.longest_list = max(self.longest_list, longest + 1)
            self._run = others[-1]
        if self._run >= self.long_list:
            self.longest_list = max(self.longest_list, self._run + 1)

    @property
    def parsed_bytes(self) -> int:
        """Upper bound for the memory that the parsed values need, in bytes.

        Non-ASCII text needs four bytes per character.
        """
        characters = self._bytes if self._is_ascii else 4 * self._bytes
        structure = _CONTAINER_BYTES * self._containers // 2 + _MEMBER_BYTES * self._members
        return characters + structure + _ELEMENT_BYTES * self._elements


def _separators(outside: bytes) -> int:
    return outside.count(b",") - outside.count(b":")


def load_json(text: str, *, scan: JsonScan | None = None, depth: int = 0) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON, and JsonLimitError for too much structure.

    scan:  counts of the enclosing body; None: count only this text.
    depth: nesting depth of the text in the body.
    """
    (scan or JsonScan()).text(text, depth=depth)
    return from_json(text)
