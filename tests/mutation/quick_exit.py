"""A pytest plugin that exits the process as soon as the outcome is printed.

A failed test may leave sockets open, and the interpreter's exit would wait for them without limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(exitstatus: int | pytest.ExitCode) -> Generator[None, object, object]:
    yield
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(exitstatus))
