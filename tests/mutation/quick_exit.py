"""A pytest plugin that ends the process once the outcome is printed.

A test that fails in the middle may leave sockets open. The end of the interpreter would wait for them without limit.
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
