"""What a server costs beside that of another checkout: the order of the runs, the ratios, and the CPU clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from serve_versions import OTHER, THIS, Rounds, cpu_seconds, say


def test_rounds_alternate_and_ratios_are_those_of_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    costs: dict[str, Iterator[float]] = {THIS: iter((1, 20, 12)), OTHER: iter((2, 10, 10))}
    order: list[tuple[str, int]] = []

    def measured(name: str, number: int) -> dict[str, float]:
        order.append((name, number))
        return {"server_cpu_us": next(costs[name]), "idle_cpu_us": 0.0}

    rounds = Rounds()
    rounds.measure(1, measured)
    rounds.measure(2, measured)  # after another start
    row = rounds.row()
    assert [name for name, _ in order] == [OTHER, THIS, THIS, OTHER, OTHER, THIS]
    assert [number for _, number in order] == [0, 0, 1, 1, 2, 2]
    assert row["server_cpu_us"] == {THIS: 12, OTHER: 10, "ratio": 1.2, "ratio_by_round": [0.5, 2.0, 1.2]}
    assert row["idle_cpu_us"]["ratio"] is None
    say("load", row, tuple(row))
    assert capsys.readouterr().out.count("(goal missed)") == 1


def test_the_cpu_clock_is_that_of_the_process() -> None:
    command = [sys.executable, "-c", "sum(range(10**6)); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        measured = psutil.Process(process.pid)
        before, ticks, after = cpu_seconds(measured), sum(measured.cpu_times()[:2]), cpu_seconds(measured)
        assert 0 < before <= after
        assert before - 0.03 <= ticks <= after + 0.03, "user and system time are counted in ticks of 10 ms"
        process.communicate(b"\n")
