"""A coordinator in a child process, which exits when the program that started it exits.

The child is a new interpreter and not a copy of its parent, so the caller's main module does not run in it. The child
reads its settings as JSON from standard input and writes its addresses as one line to standard output.
"""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import TypeAdapter

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.service import run
from megatron_runtime.process.children import END_SIGNAL, WatchedChild, be_child
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Role

STARTUP_SECONDS = 30.0

_SETTINGS = TypeAdapter(CoordinatorSettings)


class CoordinatorFailedError(RuntimeError):
    """The coordinator process has exited. The message has its exit status and the last lines of its output."""


class CoordinatorStartError(RuntimeError):
    """The coordinator process did not start: it exited, or did not report its addresses within `startup_seconds`."""


class CoordinatorProcess(WatchedChild):
    """A running coordinator.

    Clients and engines connect to `address` (single port), or to the address of their role.
    """

    def __init__(self) -> None:
        super().__init__("the coordinator", f"{__package__}.spawn", str(os.getpid()))
        self.addresses: dict[Role, str] = {}

    @property
    def address(self) -> str:
        return self.addresses[Role.CLIENT]


def spawn_coordinator(settings: CoordinatorSettings, *, startup_seconds: float = STARTUP_SECONDS) -> CoordinatorProcess:
    """Start a coordinator in a child process and wait until its sockets are bound.

    The child exits when this process exits or is killed.

    Raises CoordinatorStartError if the coordinator does not start. The standard error of the child shows the cause.
    """
    coordinator = CoordinatorProcess()
    try:
        line = coordinator.exchange(_SETTINGS.dump_json(settings), seconds=startup_seconds)
        coordinator.addresses = {Role(int(role)): address for role, address in json.loads(line).items()}
    except (OSError, ValueError) as error:
        coordinator.stop(grace_seconds=0)
        raise CoordinatorStartError(
            f"the coordinator on {settings.listen}:{settings.client_port} did not start "
            f"(exit status {coordinator.process.returncode}; its message is on standard error): "
            "choose a free port and an address of this machine"
        ) from error
    except BaseException:
        coordinator.stop(grace_seconds=0)
        raise
    return coordinator


def main() -> None:
    """Run the coordinator in the child process."""
    be_child()
    parent = int(sys.argv[1])
    settings = _SETTINGS.validate_json(sys.stdin.buffer.readline())
    # Ctrl-C in a terminal reaches the whole process group, but the parent decides when its coordinator stops.
    os.setsid()

    def on_bound(addresses: dict[Role, str]) -> None:
        _end_with(parent)
        print(json.dumps({int(role): address for role, address in addresses.items()}), flush=True)

    run(settings, on_bound=on_bound)


def _end_with(parent: int) -> None:
    """Arrange that this process gets END_SIGNAL when its parent exits.

    A closed pipe would not show that the parent has exited, because other processes may hold copies of the pipe.
    """
    loop = asyncio.get_running_loop()

    def leave() -> None:
        loop.remove_reader(descriptor)
        os.kill(os.getpid(), END_SIGNAL)

    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        sys.exit(1)
    loop.add_reader(descriptor, leave)


if __name__ == "__main__":
    main()
