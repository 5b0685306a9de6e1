"""For all tests: timeouts are scaled to this machine's speed, runs of whole folders are recorded, and measurements are
printed at the end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from machine import SCALE
from run_record import RunRecorder

_MEASUREMENTS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", metavar="GROUP", help="name of the test group in the record of this run (run_record.py)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scale the timeout of each test, which pyproject.toml gives for an idle two-core machine. Record the run.

    Enable SIGINT: a shell starts commands in the background with SIGINT ignored, which all processes of tests inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("timeout", None) is None:
        config.option.timeout = float(config.getini("timeout")) * SCALE
    config.pluginmanager.register(RunRecorder())


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "page" in getattr(item, "fixturenames", ()):
            item.add_marker("page")
            if "unit" in item.path.parts and not item.path.name.endswith("page.py"):
                raise pytest.UsageError(f"{item.nodeid}: tests of pages belong in test_*page.py: see `make test-pages`")
        marker = item.get_closest_marker("timeout")
        if marker is not None:
            item.add_marker(pytest.mark.timeout(marker.args[0] * SCALE), append=False)
    # What is begun last must not keep one process busy while others are done.
    long = {item.path for item in items if item.get_closest_marker("long") is not None}
    items.sort(key=lambda item: item.path not in long)


def pytest_report_header() -> str:
    return f"timeouts are scaled by {SCALE:g} (MEGATRON_TIME_SCALE)"


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record a measurement, which is printed after all tests."""

    def add(line: str) -> None:
        request.config.stash.setdefault(_MEASUREMENTS, []).append(f"{request.node.name}: {line}")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_MEASUREMENTS, [])
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
