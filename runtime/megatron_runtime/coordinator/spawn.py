"""A coordinator in a child process, which ends when the program that started it ends.

The child is a fresh interpreter, not a copy of its parent: the caller's main module does not run in it. It reads its
settings as JSON from standard input and writes the addresses as one line to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.service import run
from megatron_runtime.process.children import END_SIGNAL, be_child, child_environment, module_command
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Role

STARTUP_SECONDS = 30.0
STOP_SECONDS = 10.0
ENDED_SECONDS = 1.0
LAST_LINES = 10
"""Of a coordinator's messages, for an error."""

_SETTINGS = TypeAdapter(CoordinatorSettings)


class CoordinatorFailedError(RuntimeError):
    """The coordinator process has ended. The message has its exit status and its last lines."""


class CoordinatorStartError(RuntimeError):
    """The coordinator process ended, or wrote no address, before its sockets were bound."""


@dataclass(eq=False)
class CoordinatorProcess:
    """A running coordinator. Clients and engines connect to `address` (single port) or to those of their role.

    ended: describes how the process ended, when it has, for whatever reason. Callbacks run on a thread.
    """

    process: subprocess.Popen[bytes]
    addresses: dict[Role, str]
    ended: Future[str] = field(default_factory=Future, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def address(self) -> str:
        return self.addresses[Role.CLIENT]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, *, grace_seconds: float = STOP_SECONDS) -> None:
        """End the process: END_SIGNAL, then, after the grace time, SIGKILL. Blocks until it has ended. Idempotent."""
        with self._lock, self.process:  # the process closes its pipes and is waited for
            self.process.send_signal(END_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_seconds)
            self.process.kill()
        with contextlib.suppress(TimeoutError):  # another process may hold a copy of its standard error
            self.ended.result(ENDED_SECONDS)

    def _watch(self, errors: int) -> None:
        """Copy what the process writes to the pipe `errors` to this process's standard error until it ends."""
        lines: deque[bytes] = deque(maxlen=LAST_LINES)
        with open(errors, "rb") as pipe:
            for line in pipe:
                lines.append(line)
                with contextlib.suppress(OSError):
                    os.write(2, line)
        status = self.process.wait()
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            how += ", which the kernel sends if memory runs out"
        last = b"".join(lines).decode(errors="replace").strip()
        self.ended.set_result(
            f"the coordinator, process {self.process.pid}, ended with {how}; "
            + (f"its last lines: {last}" if last else "it wrote no message")
        )


def spawn_coordinator(settings: CoordinatorSettings, *, startup_seconds: float = STARTUP_SECONDS) -> CoordinatorProcess:
    """Start a coordinator and wait until its sockets are bound. It ends when this process ends or is killed.

    Raises CoordinatorStartError if it does not start; the cause is on its standard error.
    """
    errors, child_errors = os.pipe()
    try:
        process = subprocess.Popen(
            module_command(f"{__package__}.spawn", str(os.getpid())),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=child_errors,
        )
    except BaseException:
        os.close(errors)
        raise
    finally:
        os.close(child_errors)
    coordinator = CoordinatorProcess(process, {})
    threading.Thread(target=coordinator._watch, args=(errors,), name="coordinator's end", daemon=True).start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_SETTINGS.dump_json(settings) + b"\n")
        process.stdin.flush()
        line = _read_line(process.stdout, seconds=startup_seconds)
        coordinator.addresses = {Role(int(role)): address for role, address in json.loads(line).items()}
    except (OSError, ValueError) as error:
        coordinator.stop(grace_seconds=0)
        raise CoordinatorStartError(
            f"the coordinator on {settings.listen}:{settings.client_port} did not start "
            f"(exit status {process.returncode}; its message is on standard error): "
            "choose a free port and an address of this machine"
        ) from error
    except BaseException:
        coordinator.stop(grace_seconds=0)
        raise
    return coordinator


def _read_line(stream: Any, *, seconds: float) -> bytes:
    """The first line of a pipe. Raises ValueError at its end, TimeoutError (an OSError) after `seconds`."""
    ready, _, _ = select.select([stream], [], [], seconds)
    if not ready:
        raise TimeoutError(f"no address within {seconds:g} s")
    line: bytes = stream.readline()
    if not line:
        raise ValueError("the process ended before it wrote an address")
    return line


def main() -> None:
    """The child."""
    be_child()
    parent = int(sys.argv[1])
    settings = _SETTINGS.validate_json(sys.stdin.buffer.readline())
    # Ctrl-C in a terminal reaches the whole process group; the parent decides when its coordinator ends.
    os.setsid()

    def on_bound(addresses: dict[Role, str]) -> None:
        _end_with(parent)
        print(json.dumps({int(role): address for role, address in addresses.items()}), flush=True)

    run(settings, on_bound=on_bound)


def _end_with(parent: int) -> None:
    """Send this process END_SIGNAL when its parent ends. The pipe may outlive it: other processes may hold copies."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        loop.remove_reader(descriptor)
        os.kill(os.getpid(), END_SIGNAL)

    descriptor = os.pidfd_open(parent) if hasattr(os, "pidfd_open") else sys.stdin.fileno()
    if os.getppid() != parent:
        sys.exit(1)
    loop.add_reader(descriptor, leave)


if __name__ == "__main__":
    main()
