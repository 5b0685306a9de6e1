"""Print the measurements of the hostile-client tests at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record a measurement, which is printed after all tests."""

    def add(line: str) -> None:
        request.config.stash.setdefault(_LINES, []).append(line)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("hostile clients, measured")
        for line in lines:
            terminalreporter.line(line)
