"""Opens listening TCP sockets for IPv4 and IPv6, and creates folders for Unix sockets. Imports no torch."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_ADDRESS = "::"
"""Host that stands for every address of this machine: IPv4 and IPv6 if the system has IPv6, otherwise IPv4."""


def listening_socket(host: str, port: int, *, backlog: int = 100) -> socket.socket:
    """Return a socket that listens on TCP.

    host: address or name; EVERY_ADDRESS accepts clients over IPv4 and IPv6.
    port: 0 picks a free port.
    backlog: maximum number of connections that wait to be accepted.

    Raises:
        OSError: the address is in use or does not belong to this host.
    """
    if host == EVERY_ADDRESS and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == EVERY_ADDRESS)


MAX_FOLDER_BYTES = 80
"""Maximum length of the path of a folder of sockets, because the path of a Unix socket has at most 107 bytes."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder for Unix sockets, which only this user may enter. The folder is removed when the block ends.

    Every process that can open a socket in the folder is trusted, so the connections need no keys. Raises OSError.
    """
    path = tempfile.mkdtemp(prefix="megatron-")
    if len(path.encode()) > MAX_FOLDER_BYTES:
        shutil.rmtree(path)
        path = tempfile.mkdtemp(prefix="megatron-", dir="/tmp")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
