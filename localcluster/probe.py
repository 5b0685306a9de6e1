"""Checks over HTTP whether a component is ready."""

from __future__ import annotations

import http.client
import ssl
import urllib.parse
from pathlib import Path


def answers(url: str, pki: Path, *, timeout: float = 2.0) -> bool:
    """Return whether a GET request to `url` is answered with status 200."""
    return fetch(url, pki, timeout=timeout) is not None


def fetch(url: str, pki: Path, *, timeout: float = 2.0) -> bytes | None:
    """Return the body of the answer to a GET request, or None if there is no answer with status 200.

    With TLS, the client authenticates with the admin's certificate. The certificates of controller manager and
    scheduler are self-signed, so on loopback the server's identity is not verified.
    """
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
