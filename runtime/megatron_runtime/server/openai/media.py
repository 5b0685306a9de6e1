"""Reads the files of images, audio and video in conversations.

A data URL is decoded. An http or https URL is fetched only from hosts in the server setting `allowed_media_hosts`, and
redirects are followed only to these hosts. The server resolves the host name and checks the address before it connects,
so that a host name cannot lead into a private network.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import httpx

from megatron_runtime.process.environment import UnusableProxyError, http_client
from megatron_runtime.protocol.limits import MAX_MEDIA_BYTES
from megatron_runtime.protocol.media import FRAMES
from megatron_runtime.server.errors import ApiError, invalid_value, shown
from megatron_runtime.server.openai.bodies import Lease
from megatron_runtime.server.openai.content import MediaPart

MAX_PARTS = 64
"""Maximum number of images, audio and video in one request."""
FETCH_SECONDS = 10.0
"""Timeout for fetching one file including redirects, in seconds."""
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
"""Maximum number of characters in an http or https URL."""

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+\"-]*)*(?P<base64>;base64)?,", re.ASCII)
_FRAMES = re.compile("[A-Za-z0-9+/=,]+")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses whose last four bytes are an IPv4 address. A NAT64 gateway translates these addresses."""
_MAX_HEAD = 256
"""Maximum number of characters before the data in a data URL."""


class MediaLoader:
    """Reads the images, audio and video of conversations.

    allowed_hosts: allowed hosts of http and https URLs in lower case: names, or addresses as they are written in URLs.
                   A name must resolve to public addresses only.
    """

    def __init__(self, allowed_hosts: Sequence[str]) -> None:
        self._allowed = frozenset(host.lower().strip("[]") for host in allowed_hosts)

    async def load(self, parts: Sequence[tuple[str, MediaPart]], *, lease: Lease) -> list[tuple[str, bytes]]:
        """Return the kind and the content of the file of each part. Add the bytes of the files to `lease`.

        parts: each part with the name of its request field, for errors.

        Raises ApiError 400 if a URL cannot be read, ApiError 413 for too many bytes, and the errors of Lease.add().
        """
        if len(parts) > MAX_PARTS:
            message = f"The request has {len(parts)} images, audio and video: at most {MAX_PARTS} are allowed."
            raise ApiError(413, message, param=parts[0][0], code="too_much_media")
        files: list[tuple[str, bytes]] = []
        left = MAX_MEDIA_BYTES
        for param, part in parts:
            kind, data = await self._read(part, param=param, maximum=left)
            left -= len(data)
            lease.add(len(data))
            files.append((kind, data))
        return files

    async def _read(self, part: MediaPart, *, param: str, maximum: int) -> tuple[str, bytes]:
        if part.url[:5].lower() == "data:":
            media_type, data = _decoded(part.url, param=param, maximum=maximum)
        else:
            media_type, data = "", await self._fetched(part.url, param=param, maximum=maximum)
        if not data:
            raise invalid_value(param, f"the {part.modality} is empty")
        return (FRAMES if media_type == FRAMES and part.modality == "video" else part.modality), data

    async def _fetched(self, url: str, *, param: str, maximum: int) -> bytes:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await _get(await self._target(url, param=param), maximum=maximum, param=param)
                    if isinstance(answer, bytes):
                        return answer
                    url = urljoin(url, answer)
        except TimeoutError as error:
            raise invalid_value(param, f"{shown(url)} was not read within {FETCH_SECONDS:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnusableProxyError, OSError, ValueError) as error:
            raise invalid_value(param, f"{shown(url)} cannot be read: {error or type(error).__name__}") from error
        raise invalid_value(param, f"{shown(url)} is reached by more than {MAX_REDIRECTS} redirects")

    async def _target(self, url: str, *, param: str) -> _Target:
        """Return the address and path from which to fetch a URL.

        Raises ApiError 400 if the host is not allowed or has no public address.
        """
        if len(url) > MAX_URL_CHARACTERS:
            raise invalid_value(param, f"a URL of {len(url)} characters: at most {MAX_URL_CHARACTERS}, or a data URL")
        try:
            split = urlsplit(url)
            host, port = split.hostname or "", split.port
        except ValueError as error:
            raise invalid_value(param, f"{shown(url)} is no URL: {error}") from error
        if split.scheme not in ("http", "https") or not host or split.username is not None:
            raise invalid_value(
                param, f"{shown(url)} is neither a data URL nor an http or https URL with a host: send a data URL"
            )
        if host not in self._allowed:
            which = "this server fetches no URLs" if not self._allowed else f"this server fetches none from {host}"
            remedy = "start it with --allowed-media-host (spec.server.allowedMediaHosts)"
            raise invalid_value(param, f"{which}: send a data URL, or {remedy}")
        port = port or {"http": 80, "https": 443}[split.scheme]
        path = split._replace(scheme="", netloc="", fragment="").geturl()
        return _Target(split.scheme, host, port, path, await _address_of(host, port, param=param))


@dataclass(frozen=True, slots=True)
class _Target:
    """The address and path from which to fetch a file.

    path:    path and query of the URL.
    address: validated IP address of the host.
    """

    scheme: str
    host: str
    port: int
    path: str
    address: str

    def url(self, host: str) -> str:
        """Return the URL of this target with `host` in place of the host name."""
        return f"{self.scheme}://{_in_url(host)}:{self.port}/{self.path.lstrip('/')}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _address_of(host: str, port: int, *, param: str) -> str:
    """Return the IP address to connect to.

    host: any IP address, or a name that resolves to public addresses only. Other names raise ApiError 400.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise invalid_value(param, f"the host {shown(host)} has no address: {error}") from error
    addresses = [str(info[4][0]) for info in resolved]
    inner = next((address for address in addresses if not _is_public(address)), None)
    if inner is not None or not addresses:
        raise invalid_value(
            param, f"the host {shown(host)} has the address {inner}, which is not public: allow the address itself"
        )
    return addresses[0]


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    inner: ipaddress.IPv4Address | None = None
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    return parsed.is_global and not parsed.is_multicast and (inner is None or inner.is_global)


async def _get(target: _Target, *, maximum: int, param: str) -> bytes | str:
    """Return the content of the file at `target`, or the URL to which the host redirects.

    maximum: maximum size of the content, in bytes.

    Raises ApiError or httpx.HTTPError.
    """
    headers = {"Host": f"{_in_url(target.host)}:{target.port}", "Accept": "*/*", "Accept-Encoding": "identity"}
    url = target.url(target.address)  # use the validated address, so that the name is not resolved again
    async with (
        http_client(httpx.AsyncClient, url, timeout=FETCH_SECONDS, follow_redirects=False) as client,
        client.stream("GET", url, headers=headers, extensions={"sni_hostname": target.host}) as answer,
    ):
        if answer.is_redirect:
            return str(answer.headers["location"])
        if answer.status_code != 200:
            raise invalid_value(
                param, f"{shown(target.url(target.host))} was answered with status {answer.status_code}"
            )
        data = bytearray()
        async for chunk in answer.aiter_raw():
            data += chunk
            if len(data) > maximum:
                raise _too_large(param)
        return bytes(data)


def _decoded(url: str, *, param: str, maximum: int) -> tuple[str, bytes]:
    """Return the media type and the content of a data URL. Raises ApiError 400, or 413 if the content is too large."""
    head = _DATA_URL.match(url[:_MAX_HEAD])
    if head is None:
        raise invalid_value(param, f"{shown(url[:40])} is not a data URL: use one such as data:image/png;base64,…")
    body = url[head.end() :]
    if len(body) > 4 * maximum + 4 or (head["base64"] and 3 * (len(body) // 4) > maximum + 2):
        raise _too_large(param)
    media_type = (head["type"] or "").lower()
    if media_type == FRAMES:
        if head["base64"] and _FRAMES.fullmatch(body) and len(body) <= maximum:
            return media_type, body.encode()
        raise invalid_value(param, f"the frames of the video are no base64 texts of {maximum} bytes together")
    try:
        data = base64.b64decode(body, validate=True) if head["base64"] else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise invalid_value(param, f"the data URL is not base64: {error}") from error
    if len(data) > maximum:
        raise _too_large(param)
    return media_type, data


def _too_large(param: str) -> ApiError:
    message = f"Images, audio and video of one request may take {MAX_MEDIA_BYTES} bytes: send smaller or fewer ones."
    return ApiError(413, message, param=param, code="too_much_media")
