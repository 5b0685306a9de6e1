"""Processes that are forked from one that has imported what they need: imports take longer than most of what they do.

One server of multiprocessing for each process of pytest, started with the first of them. A program that is about the
interpreter's own start or end, or about memory, is started for itself instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from eventually import LONG_SECONDS

TORCH = (
    "megatron_runtime.apis",
    "megatron_runtime.engine.worker",
    "megatron_runtime.backends.echo.backend",
    "megatron_runtime.backends.native.build",
    "rank_program",
    "pytest",  # every process looks into the main module of the one that asks for it
)
"""What engines and ranks import."""

PLATFORM = (
    "megatron_operator.controller.main",
    "megatron_runtime.coordinator.service",
    "megatron_runtime.engine.worker",
    "megatron_runtime.backends.echo.backend",
    "pytest",
)
"""What an operator, a coordinator and an echo engine import: no torch."""


@cache
def warm_context(modules: Sequence[str] = TORCH) -> ForkServerContext:
    """Starts processes within milliseconds. The first call of a process decides which modules they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as environment:
        # Not every Python hands its path to the server, which then skips what it cannot import.
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


class WarmProgram:
    """`script` as the __main__ of a warm process, with its standard output in a pipe."""

    def __init__(self, script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        receiver, sender = warm_context().Pipe(duplex=False)
        self._process = warm_context().Process(
            target=_be_program, args=(str(script), arguments, dict(environment or {}), sender)
        )
        self._process.start()
        sender.close()
        with receiver:
            self.stdout = os.fdopen(os.dup(receiver.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def exit_code(self) -> int | None:
        """Once it has ended: negative for a signal."""
        self._process.join(LONG_SECONDS)
        return self._process.exitcode

    def finish(self) -> str:
        """What it has written since the last read, up to its end, which must be a good one."""
        output = self.stdout.read()
        assert self.exit_code() == 0, output
        return output

    def close(self) -> None:
        """Ends it if it still runs."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


class WarmProcess:
    """`python -m module …`, or a script by its path: as much of `subprocess.Popen` as tests need.

    environment: all that it has.
    log: what its standard output and error are added to; without one they are those of the tests.
    modules: what it has imported already, where no warm process was asked for before.
    """

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str],
        log: Path | None = None,
        modules: Sequence[str] = TORCH,
    ) -> None:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(log.open("ab")) if log is not None else None
            # A connection is how multiprocessing hands over an open file.
            outputs = [
                stack.enter_context(Connection(os.dup(file.fileno() if file is not None else number), readable=False))
                for number in (1, 2)
            ]
            self._process = warm_context(modules).Process(
                target=_be_command, args=(command, dict(environment), outputs)
            )
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a warm process", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_command(command: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Connection]) -> None:
    os.environ.clear()
    # The server ends when the tests do, and with it what would outlive them.
    os.environ.update(environment, MEGATRON_PARENT_PID=str(os.getppid()))
    for number, output in enumerate(outputs, start=1):
        with output:
            os.dup2(output.fileno(), number)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def _be_program(script: str, arguments: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    os.environ.update(environment)
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
