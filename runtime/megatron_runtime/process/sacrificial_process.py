"""A child process for work that may crash, hang or exhaust memory. In these cases, the parent gets an exception.

The parent creates a SacrificialProcess and calls it with bytes. The child is a module that calls serve() when it runs
as `__main__`. It starts as a new interpreter at the first call and handles one call at a time. If the child dies, the
next call starts another child. If the parent dies, an idle child exits immediately. A busy child exits at the timeout
of the call in progress.

    # child: megatron_runtime/example.py
    def prepare(setup: bytes) -> Callable[[bytes], bytes]:
        return lambda request: setup + request

    if __name__ == "__main__":
        serve(prepare)

    # parent
    helper = SacrificialProcess("megatron_runtime.example", memory_bytes=1 << 30, setup=b"prefix ")
    helper.call(b"text", timeout_seconds=5.0)
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from megatron_runtime.process.children import be_child, child_environment, module_command

START_SECONDS = 120.0
"""Timeout for the start of the interpreter and `prepare`. It is long, because hosts can be loaded."""

MAX_REPLY_BYTES = 16 << 20

OUT_OF_MEMORY = 3
"""Exit status of a child whose handler raised MemoryError."""

_ALARM_GRACE_SECONDS = 1.0
"""Seconds from the parent's timeout to the child's own alarm, which terminates a child whose parent has died."""

_REQUEST = struct.Struct("<dQ")
"""Header of a request: seconds until the alarm, and length of the request in bytes."""

_REPLY = struct.Struct("<Q")


class ProcessLostError(RuntimeError):
    """The child died, or exceeded its timeout or memory limit.

    The message names the cause, such as "it was killed by signal SIGSEGV".
    """


class ProcessStartError(RuntimeError):
    """The child could not be started, or failed in `prepare`. The request did not cause the error."""


@dataclass(eq=False, repr=False)
class SacrificialProcess:
    """A child process that runs `module` and handles calls. Thread-safe; concurrent calls run one after the other.

    module:          dotted name of a module that calls serve() if it runs as `__main__`.
    memory_bytes:    address space that the child may map in addition to its interpreter and modules (RLIMIT_AS).
    stack_bytes:     stack size, in bytes, of the child's thread that runs the handler; None means the system's default.
    setup:           passed to `prepare` of serve() each time the child starts.
    max_reply_bytes: maximum size of a reply; the parent kills a child that sends a longer reply.
    """

    module: str
    _: KW_ONLY
    memory_bytes: int
    stack_bytes: int | None = None
    setup: bytes = b""
    max_reply_bytes: int = MAX_REPLY_BYTES

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None if it is not running."""
        process = self._process
        return process.pid if process is not None else None

    def call(self, request: bytes, *, timeout_seconds: float) -> bytes:
        """Return the result of the child's handler for `request`.

        timeout_seconds: wall-clock time for the handler, not counting the start of a child.

        Raises:
            ProcessLostError: the child died, or was killed because it exceeded a limit. The next call starts another
                child.
            ProcessStartError: no child could be started. A later call tries again, unless close() was called.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            return self._exchange(request, timeout_seconds)

    def close(self) -> None:
        """Kill the child. A call in progress raises ProcessLostError, and later calls raise ProcessStartError.

        This method is idempotent.
        """
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = (theirs.fileno(), self.memory_bytes, self.stack_bytes or 0)
            try:
                self._process = subprocess.Popen(
                    module_command(self.module, *map(str, numbers)),
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C in a terminal reaches the whole process group, but only the parent may stop the child.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ProcessStartError(f"{self.module} could not be started: {error}") from error
        self._channel = ours
        if self._is_closed:  # close() may have been called before the process existed
            self._end()
            raise ProcessStartError(f"{self.module} was closed")
        try:
            self._exchange(self.setup, START_SECONDS)
        except ProcessLostError as error:
            raise ProcessStartError(f"{self.module} did not start: {error}") from error

    def _exchange(self, request: bytes, timeout_seconds: float) -> bytes:
        assert self._channel is not None
        deadline = time.monotonic() + timeout_seconds
        try:
            self._channel.settimeout(timeout_seconds)
            self._channel.sendall(_REQUEST.pack(timeout_seconds + _ALARM_GRACE_SECONDS, len(request)) + request)
            (size,) = _REPLY.unpack(_receive(self._channel, _REPLY.size, deadline=deadline))
            if size > self.max_reply_bytes:
                raise ProcessLostError(f"its reply has {size} bytes, at most {self.max_reply_bytes} are allowed")
            return _receive(self._channel, size, deadline=deadline)
        except TimeoutError as error:
            self._end()
            raise ProcessLostError(f"it took longer than {timeout_seconds:g} s") from error
        except OSError as error:
            raise ProcessLostError(self._cause_of_death()) from error
        except BaseException:  # also KeyboardInterrupt, because otherwise the next call would read this reply
            self._end()
            raise

    def _cause_of_death(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ALARM_GRACE_SECONDS)
        status = self._process.returncode
        self._end()
        if status == OUT_OF_MEMORY:
            return f"it needed more than {self.memory_bytes >> 20} MiB of memory"
        if status == -signal.SIGALRM:
            return "it took too long"
        if status is not None and status < 0:
            return f"it was killed by signal {signal.Signals(-status).name}"
        return f"it ended with exit status {status}"

    def _end(self) -> None:
        """Kill and reap the child, if there is one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def serve(prepare: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Run as the child: handle calls until the parent closes the connection or exits.

    prepare: receives the setup and returns the handler of requests. An exception in the handler terminates the child,
             so a handler must encode errors for its callers in its result.
    """
    descriptor, memory_bytes, stack_bytes = map(int, sys.argv[1:4])
    be_child()
    limit_memory(memory_bytes)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    threading.stack_size(stack_bytes)  # 0 means the default
    threading.Thread(target=_handle_calls, args=(descriptor, prepare)).start()


def _handle_calls(descriptor: int, prepare: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    status = 0
    try:
        with socket.socket(fileno=descriptor) as channel:
            handle = prepare(_next_request(channel))
            _reply(channel, b"")
            # Discard the output, because native code that crashes may print text of a client into the log.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stderr.fileno())
            while True:
                _reply(channel, handle(_next_request(channel)))
    except ConnectionError:  # the parent closed it
        pass
    except MemoryError:
        status = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit does not include loaded modules: OpenBLAS alone reserves 40 MiB of address space per CPU.
    with open("/proc/self/statm") as sizes:
        memory_bytes += int(sizes.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # If the host or container runs out of memory, the kernel kills this process before its parent.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _next_request(channel: socket.socket) -> bytes:
    seconds, size = _REQUEST.unpack(_receive(channel, _REQUEST.size))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return _receive(channel, size)


def _reply(channel: socket.socket, reply: bytes) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    channel.sendall(_REPLY.pack(len(reply)) + reply)


def _receive(channel: socket.socket, size: int, *, deadline: float | None = None) -> bytes:
    """Receive exactly `size` bytes. Raises ConnectionError if the connection closes, and TimeoutError at `deadline`."""
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = channel.recv(min(size - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        received += part
    return bytes(received)
