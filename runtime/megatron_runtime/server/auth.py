"""Credentials of the server, read again when their files change: API keys, one tenant each, and the TLS certificate."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from pathlib import Path

logger = logging.getLogger(__name__)

TENANT_CHARACTERS = 32
"""Hexadecimal digits of a tenant id, of 128 bits."""
_CERTIFICATE_CHECK_SECONDS = 10.0
_CHECK_SECONDS = 1.0
"""Least time between two checks of the key file: a mounted Secret changes while the server runs."""


class NoKeysError(ValueError):
    """The key file holds no key, so it would open the server to every client."""


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line. Empty lines and lines that begin with # are ignored.

    Raises OSError or UnicodeDecodeError for a file that cannot be read and NoKeysError for one without a key.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise NoKeysError(f"{str(path)!r} holds no key: write one key a line, or leave the option out")
    return keys


class ApiKeys:
    """The API keys of a file; without a file the server is open to all.

    A changed file is read again; if it cannot be used, the previous keys stay.
    A key is compared by its digest with all digests, in a time that does not depend on how much of it matches.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._digests: list[bytes] = []
        if file is not None:
            self._version = _version(file)
            self._digests = _digests(file)
        self._checked = time.monotonic()

    def tenant(self, authorization: str) -> str | None:
        """Return the tenant id of the key in an Authorization header; None if the header has none of the keys.

        The id does not reveal the key. It is empty if the server is open to all.
        """
        if self._file is None:
            return ""
        self._follow(self._file)
        scheme, _, given = authorization.partition(" ")
        # ASGI gives header bytes as Latin-1; the client sent the key's UTF-8.
        digest = _digest(given.strip().encode("latin-1", errors="replace"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _digest(b"megatron tenant " + digest).hex()[:TENANT_CHARACTERS]

    def _follow(self, file: Path) -> None:
        """Read the file again if it has changed."""
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        version = _version(file)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = _digests(file)
        except (OSError, ValueError) as error:
            logger.error("the previous API keys stay in use: %s", error)
        else:
            logger.info("%d API keys read again", len(self._digests))


def tenant_salt(tenant: str, cache_salt: str | None) -> str | None:
    """Return the prefix cache salt of a request. No other tenant has it, whatever the `cache_salt` of its requests.

    Without a tenant it is `cache_salt` itself.
    """
    if not tenant:
        return cache_salt
    return _digest(f"megatron cache salt {tenant} {cache_salt or ''}".encode()).hex()[:TENANT_CHARACTERS]


class CertificateError(ValueError):
    """A certificate or its key cannot be read or do not belong together. Names the files and the remedy."""


class Certificate:
    """A certificate chain and its key, in PEM, and the TLS context of new connections.

    Changed files are read again: a renewed certificate needs no restart.
    """

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self._files = (certificate_file, key_file)
        self._version = _version(*self._files)
        self.context = self._new_context()

    def check(self) -> bool:
        """Use changed files; return whether they are in use now. Files that cannot be used change nothing."""
        version = _version(*self._files)
        if version == self._version:
            return False
        self._version = version
        try:
            # A failure after the first file would leave a certificate without a key: try the files in a new context.
            self._new_context()
            self._load_into(self.context)
        except CertificateError as error:
            logger.warning("the previous certificate stays in use: %s", error)
            return False
        logger.info("new connections use the changed certificate")
        return True

    async def watch(self) -> None:
        """Check for changed files until cancelled."""
        while True:
            await asyncio.sleep(_CERTIFICATE_CHECK_SECONDS)
            self.check()

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise CertificateError(
                f"certificate {certificate} with key {key}: {error}; give a PEM chain and the key that belongs to it"
            ) from error


def _digests(file: Path) -> list[bytes]:
    return [_digest(key.encode()) for key in read_keys(file)]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _version(*files: Path) -> list[tuple[int, ...] | None]:
    """Return a value that differs when one of the files has been replaced or changed."""
    found: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return found
