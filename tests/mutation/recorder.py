"""A pytest plugin that records which tests execute which lines, and how long each test takes.

Environment: MUTATION_SOURCES, folders of the modules, separated by colons; MUTATION_RECORD, the JSON file to write.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_coverage = coverage.Coverage(data_file=None, source=os.environ["MUTATION_SOURCES"].split(":"))
_seconds: dict[str, float] = {}


def pytest_load_initial_conftests() -> None:
    _coverage.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _coverage.switch_context(item.nodeid)
    begun = time.monotonic()
    result = yield
    _seconds[item.nodeid] = round(time.monotonic() - begun, 3)
    _coverage.switch_context("")
    return result


def pytest_unconfigure() -> None:
    _coverage.stop()
    data = _coverage.get_data()
    root = Path.cwd()
    lines = {
        str(Path(path).relative_to(root)): {
            str(line): sorted(tests) for line, tests in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    record = {"lines": lines, "seconds": _seconds}
    Path(os.environ["MUTATION_RECORD"]).write_text(json.dumps(record))
