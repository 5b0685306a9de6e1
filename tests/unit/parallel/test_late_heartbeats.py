"""A rank whose heartbeats stop is lost; one whose heartbeats are late, or announced to pause, is not."""

from __future__ import annotations

import ctypes
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import zmq
from eventually import LONG_SECONDS

from megatron_runtime.backends.native.ranked.channel import FollowerChannel, Kind, LeaderChannel
from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.watch import (
    BEAT_SECONDS,
    HEARTBEAT_SECONDS,
    LONG_ORDER_SECONDS,
    HeartbeatTimer,
    Phase,
    Report,
    StepProgress,
)

SHORT_SECONDS = 1.5
"""The silence that the peer announces here, so that its loss does not take the usual 10 s."""
LOST = "its interpreter has sent no heartbeat for"


@dataclass
class End:
    """One end of a channel, whose peer the test plays."""

    channel: LeaderChannel | FollowerChannel
    lost: queue.SimpleQueue[RankError]
    progress: StepProgress
    peer: int
    speaks: zmq.Socket[bytes]
    hears: zmq.Socket[bytes]

    def beat(self, allowed: float = SHORT_SECONDS, report: Report | None = None) -> None:
        self.say(Kind.BEAT, [allowed, report or Report()])

    def say(self, kind: Kind, body: Any, number: int = 0) -> None:
        self.speaks.send_multipart([pack([int(kind), self.peer, number]), pack(body)])

    def hear(self, kind: Kind) -> Any:
        """The body of its next message of this kind."""
        while True:
            assert self.hears.poll(LONG_SECONDS * 1000)
            head, body = self.hears.recv_multipart()
            if unpack(head)[0] == kind:
                return unpack(body)


@pytest.fixture(params=["rank 0", "another rank"])
def end(request: pytest.FixtureRequest) -> Iterator[End]:
    with zmq.Context() as context, context.socket(zmq.PULL) as hears, context.socket(zmq.PUSH) as speaks:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind("inproc://to-it")
        speaks.connect("inproc://to-it")
        hears.bind("inproc://from-it")
        push.connect("inproc://from-it")
        lost: queue.SimpleQueue[RankError] = queue.SimpleQueue()
        progress = StepProgress()
        channel: LeaderChannel | FollowerChannel
        if request.param == "rank 0":
            channel = LeaderChannel(pull, {1: push}, progress=progress, step_timeout_seconds=60)
            channel.on_lost = lost.put
            greeting = Kind.HELLO
        else:
            channel = FollowerChannel(1, pull=pull, push=push, progress=progress, on_lost=lost.put)
            greeting = Kind.WELCOME
        found = End(channel, lost, progress, 1 if request.param == "rank 0" else 0, speaks, hears)
        found.say(greeting, None)
        channel.start(timeout_seconds=20)
        yield found
        channel.close()


def hold_interpreter(seconds: float) -> None:
    """No other thread of this process runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.timeout(120)
def test_a_peer_without_heartbeats_is_lost(end: End) -> None:
    end.beat()
    began = time.monotonic()
    error = end.lost.get(timeout=LONG_SECONDS)
    assert time.monotonic() - began >= SHORT_SECONDS
    assert error.rank == end.peer
    assert LOST in str(error)


@pytest.mark.timeout(120)
def test_a_late_heartbeat_is_not_a_loss(end: End) -> None:
    for gap in (3 * BEAT_SECONDS, 5 * BEAT_SECONDS, 3 * BEAT_SECONDS):
        end.beat(allowed=HEARTBEAT_SECONDS)
        time.sleep(gap)
    assert end.lost.empty(), end.lost.get()


@pytest.mark.timeout(120)
def test_the_delay_of_the_watching_process_does_not_count_as_silence(end: End) -> None:
    end.beat()
    time.sleep(0.1)
    hold_interpreter(2 * SHORT_SECONDS)
    time.sleep(SHORT_SECONDS / 2)
    assert end.lost.empty(), end.lost.get()
    assert LOST in str(end.lost.get(timeout=LONG_SECONDS))


@pytest.mark.timeout(120)
def test_a_command_announces_the_longer_heartbeat_timeout_and_its_end_revokes_it(end: End) -> None:
    assert end.hear(Kind.BEAT)[0] == HEARTBEAT_SECONDS
    if isinstance(end.channel, LeaderChannel):
        number = end.channel.post(Kind.COMMAND, ["load", None])
        finish: Callable[[], object] = partial(end.channel.collect, number, [1])
        end.say(Kind.ANSWER, None, number)
    else:
        end.say(Kind.COMMAND, ["load", None], 1)
        order = end.channel.orders.get(timeout=LONG_SECONDS)
        finish = partial(end.channel.answer, order, None)
    while end.hear(Kind.BEAT)[0] != LONG_ORDER_SECONDS:
        pass
    finish()
    while end.hear(Kind.BEAT)[0] != HEARTBEAT_SECONDS:
        pass


@pytest.mark.timeout(120)
def test_a_peer_that_announced_the_longer_timeout_is_not_lost(end: End) -> None:
    end.beat(allowed=LONG_ORDER_SECONDS)
    time.sleep(2 * SHORT_SECONDS)
    assert end.lost.empty(), end.lost.get()


def test_silence_is_measured_from_the_last_message() -> None:
    timer = HeartbeatTimer()
    timer.restart(100.0)
    assert timer.expired(100.0 + HEARTBEAT_SECONDS) is None
    assert timer.expired(100.0 + HEARTBEAT_SECONDS + 1) == f"{LOST} 11.0 s"
    timer.restart(100.0 + HEARTBEAT_SECONDS)
    assert timer.expired(100.0 + HEARTBEAT_SECONDS + 1) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["rank 0"], indirect=True)
def test_a_rank_0_that_is_late_does_not_take_old_reports_for_a_stall(end: End) -> None:
    assert isinstance(end.channel, LeaderChannel)
    order = end.channel.post(Kind.STEP, None)
    end.progress.begin(order)
    with end.progress.exchange():
        waits = Report(exchanges=1, phase=Phase.EXCHANGING)
        end.beat(allowed=HEARTBEAT_SECONDS, report=waits)
        for _ in range(6):
            time.sleep(0.05)
            hold_interpreter(2 * BEAT_SECONDS + 0.2)
        assert end.lost.empty(), end.lost.get()
