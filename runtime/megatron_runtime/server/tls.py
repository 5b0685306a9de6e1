"""The server's certificate, read again when its files change: a renewed one needs no restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0

Signature = tuple[tuple[int, int], ...]


class CertificateError(ValueError):
    """A certificate or its key cannot be read or do not belong together. Names the files and the remedy."""


class Certificate:
    """A certificate chain and its key, in PEM, and the context that every new connection is made with."""

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self._files = (certificate_file, key_file)
        self._seen = self._signature()
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._read_into(context)
        return context

    def _read_into(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise CertificateError(
                f"certificate {certificate} with key {key}: {error}; give a PEM chain and the key that belongs to it"
            ) from error

    def look(self) -> bool:
        """Take up changed files; True when they are in use now. Files that cannot be used change nothing."""
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            # A context that failed half-way would be left with a certificate and no key: try on another first.
            self._load()
            self._read_into(self.context)
        except CertificateError as error:
            logger.warning("the certificate in use stays: %s", error)
            return False
        logger.info("another certificate is in use for new connections")
        return True

    async def watch(self, *, every: float = LOOK_SECONDS) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(every)
            self.look()

    def _signature(self) -> Signature:
        found = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_ino, status.st_mtime_ns))
        return tuple(found)
