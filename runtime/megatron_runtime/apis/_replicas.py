"""Further HTTP servers on one listening socket, as processes that end with this one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

from megatron_runtime.process.parent import PARENT_VARIABLE
from megatron_runtime.server.settings import ServerSettings

GRACE_SECONDS = 10.0


class Replicas:
    """`count` processes of `megatron server`, told on the command line what `settings` says.

    settings: `model` names the tokenizer.
    """

    def __init__(self, settings: ServerSettings, *, listener: socket.socket, count: int) -> None:
        self._settings = settings
        self._listener = listener
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """They accept connections as soon as they are up; until then others do."""
        settings = self._settings
        descriptor = self._listener.fileno()
        command = [
            *(sys.executable, "-m", "megatron_runtime.cli", "server"),
            *("--coordinator", settings.coordinator.removeprefix("tcp://")),
            *("--model", settings.model, "--model-name", settings.served_name),
            *("--host", settings.host, "--listen-fd", str(descriptor)),
            *("--max-sequence-length", str(settings.max_sequence_length)),
            *("--tool-call-parser", settings.tool_call_parser),
            *("--drain-seconds", str(settings.drain_seconds), "--linger-seconds", "0", "--log-level", "warning"),
        ]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        for _ in range(self._count):
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(descriptor,),
                    env=environment,
                    start_new_session=True,
                )
            )

    async def stop(self) -> None:
        """SIGTERM, and after a grace time SIGKILL. Idempotent."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.terminate()
        await asyncio.gather(*(asyncio.to_thread(_await_end, process) for process in processes))


def _await_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
