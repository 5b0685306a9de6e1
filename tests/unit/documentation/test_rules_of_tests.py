"""Rules of docs/development/tests.md that every test file keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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
FUNCTIONS = {name.rpartition(".")[2] for name in WAITS}


def unscaled(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of the calls whose timeout is a number, whatever the speed of the machine."""
    for node in nodes:
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in FUNCTIONS:
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


CLOCKS = ("time.monotonic()", "time.perf_counter()", "time.time()", "loop.time()")


def of_the_clock(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of assertions that compare a time that passed with a number."""
    for node in nodes:
        if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Compare):
            continue
        for left, operator, right in zip(
            [node.test.left, *node.test.comparators], node.test.ops, node.test.comparators, strict=False
        ):
            late = left if isinstance(operator, ast.Lt | ast.LtE) else right
            limit = right if late is left else left
            if isinstance(limit, ast.Constant) and any(clock in ast.unparse(late) for clock in CLOCKS):
                yield node.lineno


def parsed(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def test_every_timeout_is_scaled_and_no_assertion_limits_a_time_that_passed() -> None:
    timeouts, limits = [], []
    for path in sorted(TESTS.rglob("*.py")):
        nodes = parsed(path.read_text())
        timeouts += [f"{path.relative_to(TESTS)}:{line}" for line in unscaled(nodes)]
        limits += [f"{path.relative_to(TESTS)}:{line}" for line in of_the_clock(nodes)]
    assert not timeouts, "use scaled() of tests/support/machine.py, or LONG_SECONDS of tests/support/eventually.py"
    assert not limits, "wait for an event with scaled() or LONG_SECONDS, which fails alike and at the latest then"


@pytest.mark.parametrize(
    "limit", ["time.monotonic() - begun < 30", "5 >= time.perf_counter() - a", "0 < time.time() < 9"]
)
def test_a_limit_of_a_time_is_found(limit: str) -> None:
    assert list(of_the_clock(parsed(f"assert {limit}"))) == [1]


@pytest.mark.parametrize("limit", ["time.monotonic() - begun >= 0.3", "time.monotonic() < deadline", "waited < 30"])
def test_a_lower_limit_or_a_deadline_is_not(limit: str) -> None:
    assert list(of_the_clock(parsed(f"assert {limit}"))) == []


@pytest.mark.parametrize(
    "call", ["asyncio.wait_for(x, 10)", "async_lock.wait(timeout=60)", "thread.join(30.0)", "asyncio.timeout(6)"]
)
def test_an_unscaled_timeout_is_found(call: str) -> None:
    assert list(unscaled(parsed(call))) == [1]


@pytest.mark.parametrize(
    "call",
    ["asyncio.wait_for(x, 0.3)", "asyncio.wait_for(x, LONG_SECONDS)", "', '.join(names)", "thread.join(scaled(9))"],
)
def test_a_short_or_scaled_one_is_not(call: str) -> None:
    assert list(unscaled(parsed(call))) == []
