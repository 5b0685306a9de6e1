"""Processes forked from a process that has already imported their modules, because imports take seconds.

Each pytest process has one fork server of multiprocessing, started with the first such process. Tests of interpreter
start and exit or of memory start a new interpreter instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from eventually import LONG_SECONDS

TORCH = (
    "megatron_runtime.megatron_core.apis",
    "megatron_runtime.engine.worker",
    "echo_engine",
    "megatron_runtime.backends.native.build",
    "megatron_runtime.server.app",
    "hypothesis",
    "rank_program",
    "warm_python",
    "pytest",  # every process imports the main module of the pytest process
    "frozen_heap",
)
"""Modules of engines, ranks, servers and fuzz targets, which do not read the environment when they are imported: each
process has its own."""

PLATFORM = (
    "megatron_operator.controller.main",
    "megatron_runtime.coordinator.service",
    "megatron_runtime.engine.worker",
    "megatron_runtime.server.app",
    "echo_engine",
    "warm_python",
    "pytest",
    "frozen_heap",
)
"""Modules of an operator, a coordinator, a server and an echo engine, without torch."""


@cache
def warm_context(modules: Sequence[str] = TORCH) -> ForkServerContext:
    """Return a context that starts processes within milliseconds. The first call sets the imported modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as environment:
        # Some Python versions do not pass sys.path to the server, which skips modules that it cannot import.
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


_PR_SET_PDEATHSIG = 1


class WarmProgram:
    """`script` as __main__ of a forked process, with its standard output and standard error in one pipe."""

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
        """Wait until it exits and return its exit code, negative for a signal."""
        self._process.join(LONG_SECONDS)
        return self._process.exitcode

    def finish(self) -> str:
        """Return the rest of its output. It must exit with status 0."""
        output = self.stdout.read()
        assert self.exit_code() == 0, output
        return output

    def close(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


class WarmProcess:
    """`python -m module …`, or a script by its path: the part of `subprocess.Popen` that tests need.

    environment: all environment variables of the process.
    log:         file to which its standard output and error are appended; None: it shares the tests' descriptors.
    output:      descriptor for standard output and error, instead of `log`.
    errors:      descriptor for standard error, if it differs from `output`.
    passed:      descriptor that the process inherits. Its number is the last argument, and the process leads a session.
    modules:     modules that the fork server imports, if this is its first process.
    """

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str],
        log: Path | None = None,
        output: int | None = None,
        errors: int | None = None,
        passed: int | None = None,
        modules: Sequence[str] = TORCH,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if log is not None:
                output = stack.enter_context(log.open("ab")).fileno()
            outputs = (1, 2) if output is None else (output, output if errors is None else errors)
            numbers = [*outputs, *([] if passed is None else [passed])]
            # multiprocessing passes an open file as a Connection.
            files = [stack.enter_context(Connection(os.dup(number))) for number in numbers]
            self._process = warm_context(modules).Process(target=_be_command, args=(command, dict(environment), files))
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


def run_warm(
    *command: str, environment: Mapping[str, str], modules: Sequence[str] = TORCH
) -> subprocess.CompletedProcess[str]:
    """Run a WarmProcess to its end, like subprocess.run with captured output."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = WarmProcess(
            *command, environment=environment, output=output.fileno(), errors=errors.fileno(), modules=modules
        )
        code = process.wait(LONG_SECONDS)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


def _be_command(command: Sequence[str], environment: Mapping[str, str], files: Sequence[Connection]) -> None:
    """files: for standard output and standard error, and the one that is passed."""
    os.environ.clear()
    os.environ.update(environment)
    # The fork server exits with pytest, and the processes with the fork server. They are no children of a supervisor:
    # SIGTERM ends them, as it ends the process of a container.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    outputs, passed = files[:2], files[2:]
    for number, output in enumerate(outputs, start=1):
        with output:
            os.dup2(output.fileno(), number)
    if passed:
        os.setsid()
        command = [*command[:-1], str(os.dup(passed[0].fileno()))]
        passed[0].close()
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def _be_program(script: str, arguments: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    # Tiny models: one thread, as in one_thread.py.
    sys.modules["megatron_runtime.backends.native.torch_executor"].default_threads = lambda: 1  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    atexit._clear()  # what the fork server registered
    runpy.run_path(script, run_name="__main__")
    atexit._run_exitfuncs()  # as at the end of an interpreter, which a child of multiprocessing leaves out
