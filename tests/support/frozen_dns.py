"""A fake DNS: every name below `test.` resolves to this machine. It does not answer while a file exists.

As a program: `frozen_dns.py SCRIPT|-m MODULE …` runs a program with it. The variable TEST_DNS_FROZEN names the file.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

PROGRAM = __file__
VARIABLE = "TEST_DNS_FROZEN"
HOST = "coordinator.test"
ANSWER_SECONDS = 30
"""Time after which the resolver gives up, as that of glibc."""

_getaddrinfo = socket.getaddrinfo


def getaddrinfo(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
    """Implements socket.getaddrinfo."""
    if not str(host).endswith(".test"):
        return _getaddrinfo(host, port, *rest, **options)
    frozen, deadline = Path(os.environ[VARIABLE]), time.monotonic() + ANSWER_SECONDS
    while frozen.exists():
        if time.monotonic() > deadline:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        time.sleep(0.05)
    return _getaddrinfo("127.0.0.1", port, *rest, **options)


class Loop(uvloop.Loop):
    """An event loop of uvloop that uses getaddrinfo() of this module instead of the resolver of libc."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        return await self.run_in_executor(None, partial(getaddrinfo, host, port, **options))


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Make the DNS stop answering this process, and all processes with the same environment, inside the context."""
    file = Path(os.environ[VARIABLE])
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def main() -> None:
    socket.getaddrinfo = getaddrinfo
    uvloop.new_event_loop = Loop  # type: ignore[assignment]
    program = sys.argv[1]
    if program == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
