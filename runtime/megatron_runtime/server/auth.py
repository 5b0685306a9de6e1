"""API keys: which clients may use the routes under /v1, and the tenant of each key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

TENANT_CHARACTERS = 32
"""Hexadecimal digits of a tenant id, of 128 bits."""
_CHECK_SECONDS = 1.0
"""Least time between two checks of the key file: a mounted Secret changes while the server runs."""


class NoKeysError(ValueError):
    """The key file holds no key, so it would open the server to every client."""


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line; empty lines and lines that begin with # do not count.

    Raises OSError or UnicodeDecodeError for a file that cannot be read and NoKeysError for one without a key.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise NoKeysError(f"{str(path)!r} holds no key: write one key a line, or leave the option out")
    return keys


class ApiKeys:
    """The keys that open the server, given or read from a file; without either it is open to all.

    A file that changes is read again; if it is unreadable then, the keys stay as they are.
    Keys are compared as digests, all of them, in a time that does not depend on how much of a key matches.
    """

    def __init__(self, keys: Iterable[str] = (), *, file: Path | None = None) -> None:
        self._file = file
        self._digests = [_digest(key.encode()) for key in (keys if file is None else read_keys(file))]
        self._version = self._file_version()
        self._checked = time.monotonic()

    def tenant(self, authorization: str) -> str | None:
        """Return the tenant id of the key in an Authorization header; None if the header has none of the keys.

        The id is opaque: the key cannot be read from it. It is empty if the server is open to all.
        """
        self._follow_file()
        if not self._digests:
            return ""
        scheme, _, given = authorization.partition(" ")
        # ASGI gives header bytes as Latin-1; the client sent the key's UTF-8.
        digest = _digest(given.strip().encode("latin-1", errors="replace"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _digest(b"megatron tenant " + digest).hex()[:TENANT_CHARACTERS]

    def _follow_file(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        version = self._file_version()
        if version == self._version:
            return
        try:
            keys = read_keys(self._file)
        except (OSError, ValueError) as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            self._digests = [_digest(key.encode()) for key in keys]
            logger.info("%d API keys read again", len(keys))
        self._version = version

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


def tenant_salt(tenant: str, cache_salt: str | None) -> str | None:
    """Return the salt of the prefix cache for a request. No other tenant has it, whatever its requests' `cache_salt`.

    Without a tenant it is `cache_salt` itself.
    """
    if not tenant:
        return cache_salt
    return _digest(f"megatron cache salt {tenant} {cache_salt or ''}".encode()).hex()[:TENANT_CHARACTERS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
