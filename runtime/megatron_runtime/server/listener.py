"""The listening socket, bound before anything slow is done."""

from __future__ import annotations

import socket

BACKLOG = 2048


def listen(*, host: str, port: int) -> socket.socket:
    """Return a listening socket: a taken port is told at once, and early connections wait instead of failing.

    Raises OSError that names the address and the options to change.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. asyncio sets it only on sockets that were made with an explicit protocol number;
    # without it the second event of a stream waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        raise OSError(error.errno, message) from error
    return listener
