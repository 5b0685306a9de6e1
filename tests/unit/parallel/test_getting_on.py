"""Which rank does not get on: told from one that is slow, waits for others, or whose network carries data."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_runtime.distributed import step_watch
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.standstill import STANDSTILL_SECONDS, Standstill
from megatron_runtime.distributed.step_progress import Phase, Report, StepProgress
from megatron_runtime.distributed.step_watch import StepWatch

WAITS = Report(done=4, signs=9, exchanges=7, phase=Phase.EXCHANGING, place="exchange 7, of layer 2, of step 5")
COMPUTES = Report(done=4, signs=9, exchanges=6, phase=Phase.COMPUTING, place="layer 2 of step 5")


def standstill(before: dict[int, Report], after: dict[int, Report], *, order: int = 5) -> tuple[int, str] | None:
    """What is said when `before` has been seen just now, and `after` a good while later."""
    watch = Standstill()
    assert watch.look(order, before, now=10.0) is None
    looks = [watch.look(order, after, now=10.0 + 0.5 * number) for number in range(1, 1 + int(2 * STANDSTILL_SECONDS))]
    assert not any(looks[:-1])
    return looks[-1]


def test_ranks_that_all_wait_for_each_other_are_named_with_the_last_of_them() -> None:
    last = Report(done=4, signs=8, exchanges=5, phase=Phase.EXCHANGING, place="exchange 5, of layer 1, of step 5")
    found = standstill({0: WAITS, 1: last}, {0: WAITS, 1: last})
    assert found is not None
    rank, cause = found
    assert rank == 1
    assert "no rank has got on for 3.0 s" in cause
    assert "rank 0 is in exchange 7, of layer 2, of step 5; rank 1 is in exchange 5, of layer 1, of step 5" in cause


def test_a_rank_that_does_not_begin_is_named() -> None:
    found = standstill({0: WAITS, 1: Report(done=4)}, {0: WAITS, 1: Report(done=4)})
    assert found is not None
    assert found[0] == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({0: WAITS, 1: COMPUTES}, {0: WAITS, 1: COMPUTES}),  # it judges itself
        ({0: WAITS, 1: Report(4, 8, 7, Phase.EXCHANGING, "")}, {0: WAITS, 1: WAITS}),  # one gets on
        ({0: Report(done=5), 1: Report(done=5)}, {0: Report(done=5), 1: Report(done=5)}),  # there is no step
    ],
    ids=["one computes", "one gets on", "idle"],
)
def test_ranks_that_may_get_on_are_waited_for(before: dict[int, Report], after: dict[int, Report]) -> None:
    assert standstill(before, after) is None


def test_ranks_that_connect_in_a_warm_up_are_waited_for() -> None:
    watch = Standstill()
    looks = [watch.look(5, {0: WAITS, 1: WAITS}, now=10.0 + 0.5 * number, patience=60.0) for number in range(121)]
    assert not any(looks[:-1])
    assert looks[-1] is not None


def test_whether_a_silent_rank_gets_on_nobody_knows() -> None:
    watch = Standstill()
    reports = {0: WAITS, 1: WAITS}
    looks = [watch.look(5, reports, now=10.0 + 0.5 * number, is_current=number < 4) for number in range(60)]
    assert not any(looks)
    again = [watch.look(5, reports, now=40.0 + 0.5 * number) for number in range(4)]
    assert again[-1] is not None, "what was seen before its silence counts"


def test_who_stood_still_itself_knows_nothing_of_the_others() -> None:
    watch = Standstill()
    for now in (10.0, 40.0):
        assert watch.look(5, {0: WAITS, 1: WAITS}, now=now) is None


@contextmanager
def step(
    progress: StepProgress, work: float, do: threading.Event | None, *, is_warm_up: bool = False
) -> Iterator[None]:
    """A step on a thread of its own: it computes, or waits for `do`, until the block ends."""
    over = threading.Event()

    def run() -> None:
        progress.begin(progress.done + 1, is_warm_up=is_warm_up)
        progress.begin_batch(work)
        progress.reach("layer", 3)
        while not over.is_set():
            if do is not None:
                do.wait()
        progress.end(progress.done + 1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if do is not None:
            do.set()
        thread.join()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> StepWatch:
    """Of a rank whose layers took about a hundredth of a second a token in the last step."""
    monkeypatch.setattr(step_watch, "STUCK_SECONDS", 0.2)
    progress = StepProgress()
    progress.begin(1)
    progress.begin_batch(1.0)
    progress.reach("layer", 0)
    time.sleep(0.01)
    progress.end(1)
    return StepWatch(progress, step_timeout_seconds=600)


def looked(watch: StepWatch, seconds: float) -> str | None:
    """The first thing that is wrong within about so many seconds of this thread's time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        cause = watch.look()
        if cause is not None:
            return cause
        time.sleep(0.05)
    return None


def test_a_step_that_takes_far_more_than_those_before_is_stuck(watch: StepWatch) -> None:
    with step(watch.progress, 1.0, None):
        cause = looked(watch, 60)
    assert cause is not None
    assert "in layer 3 of step 2: it is computing, which took less than" in cause
    assert ", at " in cause  # where its program is


def test_a_step_with_far_more_work_than_those_before_is_slow(watch: StepWatch) -> None:
    with step(watch.progress, 10_000.0, None):
        assert looked(watch, 1.5) is None


def test_the_first_step_has_nothing_to_compare_with_but_the_step_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "STUCK_SECONDS", 0.2)
    progress = StepProgress()
    with step(progress, 1.0, None):
        assert looked(StepWatch(progress, step_timeout_seconds=600), 1.0) is None
        assert "it is computing, at" in str(looked(StepWatch(progress, step_timeout_seconds=0.3), 60))


def test_a_warm_up_has_a_time_of_its_own_whatever_was_before(watch: StepWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    with step(watch.progress, 1.0, None, is_warm_up=True):
        assert looked(watch, 1.0) is None
        monkeypatch.setattr(step_watch, "WARM_UP_SECONDS", 0.3)
        brief = StepWatch(watch.progress, step_timeout_seconds=0.1)
        assert "it is computing, at" in str(looked(brief, 60))


def test_kernels_are_compiled_in_a_warm_up_and_not_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "STUCK_SECONDS", 0.2)
    progress = StepProgress()
    watch = StepWatch(progress, step_timeout_seconds=600, compiles=True)
    with step(progress, 1.0, threading.Event(), is_warm_up=True):
        assert looked(watch, 1.0) is None
        assert watch.is_setting_up
    with step(progress, 1.0, threading.Event()):
        assert "it is blocked, at threading.py" in str(looked(watch, 60))
        assert not watch.is_setting_up


def noted(*steps: tuple[str, float, float]) -> StepProgress:
    """What has done steps of one place, work and duration each."""
    progress = StepProgress()
    for place, work, seconds in steps:
        progress.begin(1)
        progress.begin_batch(work)
        progress.reach(place)
        progress.marked_at -= seconds
        progress.end(1)
    return progress


def expected(progress: StepProgress, place: str, work: float) -> float | None:
    progress.begin(2)
    progress.begin_batch(work)
    progress.reach(place)
    return progress.expected_seconds()


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (1, 0.1),  # as long as such a step has taken
        (3, 0.3),  # more in proportion
        (70, 0.7),  # to the step nearest in size, whose tokens took less each
        (640, 6.4),
    ],
)
def test_a_step_is_compared_with_those_of_its_size(work: float, seconds: float) -> None:
    found = expected(noted(("layer", 1, 0.1), ("layer", 64, 0.64), ("sampling", 1, 9.0)), "layer", work)
    assert found == pytest.approx(seconds, rel=0.2)


def test_a_step_smaller_than_all_before_may_take_as_long_as_those() -> None:
    assert expected(noted(("layer", 64, 0.64)), "layer", 1) == pytest.approx(0.64, rel=0.2)


def test_the_slowest_of_the_last_steps_counts_and_old_ones_are_forgotten() -> None:
    slow_once = [("layer", 4.0, 2.0), *[("layer", 5.0, 0.1)] * 7]
    assert expected(noted(*slow_once), "layer", 4) == pytest.approx(2.0, rel=0.2)
    assert expected(noted(*slow_once, ("layer", 5.0, 0.1)), "layer", 4) == pytest.approx(0.08, rel=0.5)


def test_each_block_of_logits_is_a_sign_that_a_rank_gets_on() -> None:
    """A prompt's log-probabilities are many blocks, which its number of tokens does not tell."""
    groups = Groups(
        dist.HashStore(), ParallelSizes(), rank=0, device=torch.device("cpu"), timeout=timedelta(seconds=60)
    )
    try:
        groups.progress.begin(1)
        groups.gather_logits(torch.zeros(2, 5), 5)
        marks = groups.progress.marks
        assert groups.progress.place() == "logits of step 1"
        groups.gather_logits(torch.zeros(2, 5), 5)
        assert groups.progress.marks > marks
    finally:
        groups.close()


def test_a_place_that_was_not_seen_has_no_pace() -> None:
    assert expected(noted(("layer", 1, 0.1)), "sampling", 1) is None


def test_a_step_that_does_nothing_is_stuck_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "STUCK_SECONDS", 0.2)
    progress = StepProgress()
    with step(progress, 1.0, threading.Event()):
        assert "it is blocked, at threading.py" in str(looked(StepWatch(progress, step_timeout_seconds=600), 60))


def test_what_is_carried_in_an_exchange_is_a_sign_that_it_gets_on() -> None:
    progress = StepProgress()
    watch = StepWatch(progress, step_timeout_seconds=600)
    progress.begin(1)
    with progress.exchange():
        for _ in range(2):
            watch.look()
        still = watch.report()
        assert (still.phase, still.exchanges) == (Phase.EXCHANGING, 1)
        assert watch.look() is None
        assert watch.report() == still
        with open(os.devnull, "wb") as drain:
            drain.write(bytes(step_watch.TRAFFIC_BYTES + 1))
        assert watch.look() is None
        assert watch.report().signs > still.signs
