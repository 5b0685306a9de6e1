"""Who is held up by the machine, and what is left out because of it."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.cli.bench.pauses import MOST_PROCESSORS, PauseWatch, Stretch, Trip, undisturbed

BLOCK = """
import os, time
os.sched_setaffinity(0, {PROCESSOR})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
begun = time.perf_counter()
while time.perf_counter() - begun < 0.05:
    pass
print(begun, time.perf_counter())
"""


def trips(*stretches: tuple[float, float]) -> list[Trip]:
    return [Trip(begun, ended, number) for number, (begun, ended) in enumerate(stretches)]


def test_a_trip_within_which_a_pause_fell_is_left_out() -> None:
    before, hit, after = trips((0, 1), (2, 3), (4, 5))
    assert undisturbed([after, hit, before], [Stretch(2.4, 2.6)]) == [before, after]


def test_so_is_one_that_was_still_on_its_way_and_one_that_had_to_wait_behind_it() -> None:
    alone, first, second, third = trips((0, 1), (2, 4), (3, 6), (5, 7))
    assert undisturbed([alone, first, second, third], [Stretch(2.5, 2.6)]) == [alone]
    assert undisturbed([alone, first, second, third], [Stretch(6.5, 6.6)]) == [alone]


def test_a_pause_between_trips_disturbs_nobody() -> None:
    both = trips((0, 1), (3, 4))
    assert undisturbed(both, [Stretch(1.5, 2.5)]) == both


def test_a_long_pause_of_one_processor_is_not_hidden_by_a_short_one_of_another() -> None:
    assert undisturbed(trips((5, 6)), [Stretch(0, 9), Stretch(1, 2)]) == []


spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12)), max_size=30)


@given(spans, spans)
def test_kept_is_what_no_pause_touched_itself_or_through_others(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    made = trips(*((begun, begun + length) for begun, length in some))
    pauses = [Stretch(begun, begun + length) for begun, length in others]
    disturbed = {trip for trip in made if any(p.begun <= trip.ended and trip.begun <= p.ended for p in pauses)}
    while True:  # whoever shares a moment with one of them is one of them
        more = {t for t in made for d in disturbed if t.begun <= d.ended and d.begun <= t.ended} - disturbed
        if not more:
            break
        disturbed |= more
    assert undisturbed(made, pauses) == sorted(set(made) - disturbed)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) > MOST_PROCESSORS, reason="so many processors are not watched")
def test_a_processor_kept_from_every_program_is_noticed() -> None:
    processor = min(os.sched_getaffinity(0))
    with PauseWatch() as watch:
        code = BLOCK.replace("PROCESSOR", str(processor))
        blocked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        time.sleep(0.01)
    if watch.pauses is None:
        assert "PermissionError" in blocked.stderr
        pytest.skip("real-time priority is not permitted here")
    begun, ended = map(float, blocked.stdout.split())
    assert any(pause.begun <= begun + 0.001 and pause.ended >= ended for pause in watch.pauses)
