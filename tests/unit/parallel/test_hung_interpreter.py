"""A process whose interpreter hangs ends, with the place where it hangs, the first process of a container as well."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from eventually import LONG_SECONDS

from megatron_runtime.distributed.interpreter_watch import BEAT_SECONDS, END_SECONDS, END_STATUS, Patience

PROGRAM = """
import ctypes, os, sys
from megatron_runtime.distributed import interpreter_watch

interpreter_watch.END_SECONDS = 0.5
watch = interpreter_watch.InterpreterWatch()
watch.beat(is_long=False)
watch.end()
watch = interpreter_watch.InterpreterWatch()
watch.beat(is_long=True)
watch.beat(is_long=False)
print(os.getpid(), flush=True)

def hang():
    ctypes.PyDLL(None).sleep(60)

hang()
"""
LATE = """
import signal, time
from megatron_runtime.distributed.interpreter_watch import InterpreterWatch

watch = InterpreterWatch()
watch.beat(is_long=False)
at_first, _ = signal.getitimer(signal.ITIMER_REAL)
time.sleep(1.5)
watch.beat(is_long=False)
print(at_first, signal.getitimer(signal.ITIMER_REAL)[0])
watch.end()
"""
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def run(*before: str) -> subprocess.CompletedProcess[str]:
    program = [*before, sys.executable, "-c", PROGRAM]
    return subprocess.run(program, check=False, capture_output=True, text=True, timeout=LONG_SECONDS)


@pytest.mark.parametrize("is_first", [False, True], ids=["any", "the first of a container"])
def test_it_ends_and_says_where_it_hung(is_first: bool) -> None:
    if is_first and (shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode):
        pytest.skip("no process of this user can be the first of a container here")
    ended = run(*CONTAINER) if is_first else run()
    assert (ended.stdout == "1\n") is is_first
    assert ended.returncode == END_STATUS
    assert "in hang" in ended.stderr


def test_the_alarm_waits_longer_for_an_interpreter_that_came_late_a_moment_ago() -> None:
    output = subprocess.run([sys.executable, "-c", LATE], check=True, capture_output=True, text=True).stdout
    # Three seconds more after 1.5 s instead of 0.5, less what has passed since.
    at_first, later = map(float, output.split())
    assert at_first <= END_SECONDS
    assert END_SECONDS + 1.0 < later <= END_SECONDS + Patience.MOST_SECONDS


def heard(*gaps: float, was_long: bool = False) -> Patience:
    """Signs of life with these seconds between them."""
    patience, now = Patience(), 100.0
    patience.heard(now)
    for gap in gaps:
        now += gap
        patience.heard(now, was_long=was_long)
    return patience


def test_one_whose_signs_of_life_come_late_is_given_three_times_as_much_more() -> None:
    assert heard(BEAT_SECONDS, 0.1, BEAT_SECONDS).extra_seconds == 0
    assert heard(BEAT_SECONDS, 1.5, BEAT_SECONDS).extra_seconds == pytest.approx(3.0)
    assert heard(0.9, 1.5, 0.7).extra_seconds == pytest.approx(3.0)


def test_it_is_forgotten_ten_seconds_later() -> None:
    assert heard(1.5, *[BEAT_SECONDS] * 19).extra_seconds == pytest.approx(3.0)
    assert heard(1.5, *[BEAT_SECONDS] * 21).extra_seconds == 0


def test_there_is_a_limit_and_a_long_order_is_not_lateness() -> None:
    assert heard(60.0).extra_seconds == Patience.MOST_SECONDS
    assert heard(60.0, was_long=True).extra_seconds == 0
