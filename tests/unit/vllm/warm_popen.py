"""The part of `subprocess` that process.py uses, for Python modules that are forked from a warm process.

Each test starts one or more processes of the backend, whose imports take longer than the rest of the test.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from warm_python import WarmProcess

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
TimeoutExpired = subprocess.TimeoutExpired


class Popen(WarmProcess):
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
        super().__init__("-m", module, descriptor, environment=env, output=writer, passed=pass_fds[0])
        os.close(writer)
