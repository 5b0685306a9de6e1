"""Fixtures: processes that are stopped after each test, and measurements that are printed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fleet import Fleet

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record a measurement, which is printed after all tests."""

    def add(line: str) -> None:
        request.config.stash.setdefault(_LINES, []).append(f"{request.node.name}: {line}")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("survival, measured")
        for line in lines:
            terminalreporter.line(line)
