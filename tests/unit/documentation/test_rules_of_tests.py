"""Rules of docs/development/tests.md that every test file keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SHORT_SECONDS = 5.0
"""A test may wait for such a timeout to expire. A longer one fails the test, so it depends on the machine."""
WAITS = {
    "asyncio.timeout": 0,
    "asyncio.wait_for": 1,
    "socket.create_connection": 1,
    "subprocess.run": None,
    "urllib.request.urlopen": 2,
    ".communicate": 1,
    ".get": None,
    ".join": 0,
    ".result": 0,
    ".wait": 0,
}
"""Calls that give up after a time, and the position of the time; None: the keyword `timeout` only."""


def unscaled(text: str) -> Iterator[int]:
    """Yield the lines of the calls whose timeout is a number, whatever the speed of the machine."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        found = next((place for wait, place in WAITS.items() if name == wait or name.endswith(wait)), -1)
        if found == -1:
            continue
        limits = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "delay")]
        if found is not None and len(node.args) > found:
            limits.append(node.args[found])
        if any(
            isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value > SHORT_SECONDS
            for limit in limits
        ):
            yield node.lineno


def test_every_timeout_that_fails_a_test_is_scaled() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in unscaled(path.read_text())
    ]
    assert not found, "use scaled() of tests/support/machine.py, or LONG_SECONDS of tests/support/eventually.py"


@pytest.mark.parametrize(
    "call", ["asyncio.wait_for(x, 10)", "async_lock.wait(timeout=60)", "thread.join(30.0)", "asyncio.timeout(6)"]
)
def test_an_unscaled_timeout_is_found(call: str) -> None:
    assert list(unscaled(call)) == [1]


@pytest.mark.parametrize(
    "call",
    ["asyncio.wait_for(x, 0.3)", "asyncio.wait_for(x, LONG_SECONDS)", "', '.join(names)", "thread.join(scaled(9))"],
)
def test_a_short_or_scaled_one_is_not(call: str) -> None:
    assert list(unscaled(call)) == []
