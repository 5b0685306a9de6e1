"""The rank that stalls a step is distinguished from slow ranks and from ranks that wait for others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.watch import (
    BEAT_SECONDS,
    COLLECTIVE_SECONDS,
    WARM_UP_SECONDS,
    Phase,
    Report,
    Stall,
    StepProgress,
    StepWatch,
)

STEP_TIMEOUT = 60.0
WAITS = Report(done=4, marks=9, exchanges=7, phase=Phase.EXCHANGING, place="exchange 7, of layer 2, of step 5")
WAITS_EARLIER = Report(done=4, marks=8, exchanges=5, phase=Phase.EXCHANGING, place="exchange 5, of layer 1, of step 5")
COMPUTES = Report(done=4, marks=9, exchanges=6, phase=Phase.COMPUTING, place="layer 2 of step 5")


def stalled(
    reports: Mapping[int, Report], *, is_warm_up: bool = False, look_seconds: float = BEAT_SECONDS, looks: int = 2000
) -> tuple[float, Stall] | None:
    """Look at the same reports again and again. Returns the time until the stall is found, and the stall."""
    watch = StepWatch(STEP_TIMEOUT)
    for number in range(looks):
        found = watch.look(5, reports, now=10.0 + look_seconds * number, is_warm_up=is_warm_up)
        if found is not None:
            return look_seconds * number, found
    return None


def test_a_rank_that_computes_for_longer_than_the_step_timeout_is_named() -> None:
    found = stalled({0: WAITS, 1: COMPUTES})
    assert found is not None
    seconds, stall = found
    assert seconds == STEP_TIMEOUT
    assert (stall.rank, stall.is_computing) == (1, True)
    assert "no rank has made progress for 60.0 s" in stall.cause
    assert "rank 0 is in exchange 7, of layer 2, of step 5; rank 1 is in layer 2 of step 5" in stall.cause


def test_of_ranks_that_all_wait_in_collectives_the_last_one_is_named_after_the_collective_timeout() -> None:
    found = stalled({0: WAITS, 1: WAITS_EARLIER})
    assert found is not None
    seconds, stall = found
    assert seconds == COLLECTIVE_SECONDS
    assert (stall.rank, stall.is_computing) == (1, False)


def test_a_rank_that_does_not_begin_its_step_is_named() -> None:
    found = stalled({0: WAITS, 1: Report(done=4)})
    assert found is not None
    assert found[1].rank == 1


def test_a_collective_may_not_take_longer_than_a_short_step_timeout() -> None:
    watch = StepWatch(2.0)
    looks = [watch.look(5, {0: WAITS, 1: WAITS_EARLIER}, now=10.0 + BEAT_SECONDS * number) for number in range(5)]
    assert [look is not None for look in looks] == [False, False, False, False, True]


def test_a_slow_step_of_a_loaded_machine_is_not_a_stall() -> None:
    """Each part of it takes almost the timeout, the step many times as long."""
    watch, now = StepWatch(STEP_TIMEOUT), 10.0
    for mark in range(20):
        reports = {0: WAITS, 1: Report(done=4, marks=mark, exchanges=6, phase=Phase.COMPUTING)}
        for _ in range(int(0.9 * STEP_TIMEOUT / BEAT_SECONDS)):
            assert watch.look(5, reports, now=now) is None
            now += BEAT_SECONDS


def test_ranks_without_a_step_are_not_stalled() -> None:
    assert stalled({0: Report(done=5), 1: Report(done=5)}) is None


def test_a_warm_up_may_take_longer_than_other_steps() -> None:
    for reports in ({0: WAITS, 1: WAITS_EARLIER}, {0: WAITS, 1: COMPUTES}):
        found = stalled(reports, is_warm_up=True)
        assert found is not None
        assert found[0] == WARM_UP_SECONDS


def test_own_delay_of_rank_0_hardly_counts() -> None:
    found = stalled({0: WAITS, 1: COMPUTES}, look_seconds=30.0)
    assert found is not None
    assert found[0] >= 30.0 * STEP_TIMEOUT


def test_progress_names_the_place_and_counts_collectives() -> None:
    progress = StepProgress()
    assert progress.report().place == "no step"
    progress.begin(3)
    progress.reach("layer", 7)
    computing = progress.report()
    assert (computing.place, computing.phase) == ("layer 7 of step 3", Phase.COMPUTING)
    with progress.exchange():
        waiting = progress.report()
    assert (waiting.place, waiting.phase, waiting.exchanges) == (
        "exchange 1, of layer 7, of step 3",
        Phase.EXCHANGING,
        1,
    )
    assert computing.marks < waiting.marks < progress.report().marks
    progress.end(3)
    assert (progress.report().done, progress.report().phase) == (3, Phase.IDLE)


def test_failed_collective_is_reported_as_the_place_of_the_rank() -> None:
    progress = StepProgress()
    progress.begin(1)
    with pytest.raises(RuntimeError), progress.exchange():
        raise RuntimeError("another rank is gone")
    assert progress.report().phase is Phase.EXCHANGING


def test_each_block_of_logits_is_progress() -> None:
    """The log-probabilities of a prompt are many blocks in one step."""
    groups = Groups(
        dist.HashStore(), ParallelSizes(), rank=0, device=torch.device("cpu"), timeout=timedelta(seconds=60)
    )
    try:
        groups.progress.begin(1)
        groups.gather_logits(torch.zeros(2, 5), 5)
        report = groups.progress.report()
        assert report.place == "logits of step 1"
        groups.gather_logits(torch.zeros(2, 5), 5)
        assert groups.progress.report().marks > report.marks
    finally:
        groups.close()


def test_a_report_arrives_as_it_was_sent() -> None:
    assert Report.from_wire(unpack(pack(WAITS))) == WAITS
