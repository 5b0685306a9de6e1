"""The part of `subprocess` that process.py uses, for Python modules that are forked from a warm process.

Each test starts one or more processes of the backend, whose imports take longer than the rest of the test.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from warm_python import warm_context

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
TimeoutExpired = subprocess.TimeoutExpired


class Popen:
    """A process with its output in one pipe, and with one descriptor of the parent, whose number is its argument.

    command: as module_command() returns it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: tuple[int],
        encoding: str,
        errors: str,
        **_: Any,
    ) -> None:
        *_, module, descriptor = command
        assert pass_fds == (int(descriptor),)
        reader, writer = os.pipe()
        self.stdout = os.fdopen(reader, encoding=encoding, errors=errors)
        with Connection(writer, readable=False) as output, Connection(os.dup(pass_fds[0])) as passed:
            self._process = warm_context().Process(target=_be, args=(module, dict(env), output, passed))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise TimeoutExpired("a warm process", timeout)
        return code


def _be(module: str, environment: Mapping[str, str], output: Connection, passed: Connection) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    descriptor = os.dup(passed.fileno())
    passed.close()
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [module, str(descriptor)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
