"""An HTTP server of the standard library in a thread of the test process."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(
    handler: Callable[..., Any], *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Serve with a handler class on a free port until the end of the context."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
