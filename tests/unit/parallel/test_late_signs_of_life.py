"""Both ends of the channel between ranks wait longer for one whose messages have come late already."""

from __future__ import annotations

import ctypes
import queue
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from eventually import LONG_SECONDS

from megatron_runtime.backends.native.ranked.follower_channel import FollowerChannel
from megatron_runtime.backends.native.ranked.leader_channel import LeaderChannel
from megatron_runtime.backends.native.ranked.plan_channel import Kind
from megatron_runtime.backends.native.ranked.plan_codec import pack
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.interpreter_watch import BEAT_SECONDS, HANG_SECONDS, Patience
from megatron_runtime.distributed.step_progress import Phase, Report, StepProgress
from megatron_runtime.distributed.step_watch import StepWatch

GAP_SECONDS = 1.5
PATIENT_SECONDS = HANG_SECONDS + Patience.TIMES_LATE * (GAP_SECONDS - BEAT_SECONDS)


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Pull and push of the end under test, and what the other side, which is played, speaks on."""
    with zmq.Context() as context, context.socket(zmq.PULL) as swallows, context.socket(zmq.PUSH) as speaks:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind("inproc://to-it")
        speaks.connect("inproc://to-it")
        swallows.bind("inproc://from-it")
        push.connect("inproc://from-it")
        yield pull, push, speaks


def silence_until_lost(say: Callable[[], None], lost: queue.SimpleQueue[RankError]) -> float:
    """Say something, late again, and nothing more. Seconds from then until it was called hung."""
    say()
    time.sleep(GAP_SECONDS)
    say()
    return seconds_until_lost(lost)


def hold_interpreter(seconds: float) -> None:
    """No other thread of this process runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def look_late_until_lost(say: Callable[[], None], lost: queue.SimpleQueue[RankError]) -> float:
    """Say something in time, let who listens look late, and say nothing more. Seconds as above."""
    say()
    time.sleep(0.1)
    hold_interpreter(GAP_SECONDS)
    return seconds_until_lost(lost)


def seconds_until_lost(lost: queue.SimpleQueue[RankError]) -> float:
    """Of the clock: of the silence itself, what passes while who listens stands still does not count."""
    began = time.monotonic()
    assert "its interpreter has not answered for" in str(lost.get(timeout=LONG_SECONDS))
    return time.monotonic() - began


Until = Callable[[Callable[[], None], "queue.SimpleQueue[RankError]"], float]
whoever_is_late = pytest.mark.parametrize("until_lost", [silence_until_lost, look_late_until_lost])


@whoever_is_late
@pytest.mark.timeout(120)
def test_rank_0_waits_longer_for_another(ends: tuple[zmq.Socket[bytes], ...], until_lost: Until) -> None:
    pull, push, speaks = ends
    lost: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    channel = LeaderChannel(pull, {1: push}, watch=StepWatch(StepProgress(), step_timeout_seconds=60))
    channel.on_lost = lost.put
    speaks.send_multipart([pack([int(Kind.HELLO), 1, 0]), pack(None)])
    channel.start(timeout_seconds=20)
    beat = [pack([int(Kind.BEAT), 1, 0]), pack(Report().to_wire())]
    assert until_lost(lambda: speaks.send_multipart(beat), lost) >= PATIENT_SECONDS
    channel.close()


@whoever_is_late
@pytest.mark.timeout(120)
def test_another_waits_longer_for_rank_0(ends: tuple[zmq.Socket[bytes], ...], until_lost: Until) -> None:
    pull, push, speaks = ends
    lost: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    watch = StepWatch(StepProgress(), step_timeout_seconds=60)
    channel = FollowerChannel(1, pull=pull, push=push, watch=watch, on_lost=lost.put)
    speaks.send_multipart([pack([int(Kind.WELCOME), 0, 0]), pack(None)])
    channel.start(timeout_seconds=20)
    beat = [pack([int(Kind.BEAT), 0, 0]), pack(False)]
    assert until_lost(lambda: speaks.send_multipart(beat), lost) >= PATIENT_SECONDS
    channel.close()


@pytest.mark.timeout(120)
def test_the_old_words_of_a_silent_rank_are_not_taken_for_new_by_a_rank_0_that_looks_late(
    ends: tuple[zmq.Socket[bytes], ...],
) -> None:
    pull, push, speaks = ends
    lost: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    progress = StepProgress()
    channel = LeaderChannel(pull, {1: push}, watch=StepWatch(progress, step_timeout_seconds=60))
    channel.on_lost = lost.put
    speaks.send_multipart([pack([int(Kind.HELLO), 1, 0]), pack(None)])
    channel.start(timeout_seconds=20)
    order = channel.post(Kind.STEP, None)
    progress.begin(order)
    progress.phase = Phase.EXCHANGING
    waits = Report(exchanges=1, phase=Phase.EXCHANGING)
    speaks.send_multipart([pack([int(Kind.BEAT), 1, 0]), pack(waits.to_wire())])
    for _ in range(6):
        time.sleep(0.05)
        hold_interpreter(2 * BEAT_SECONDS + 0.2)
    assert lost.empty(), lost.get()
    channel.close()
