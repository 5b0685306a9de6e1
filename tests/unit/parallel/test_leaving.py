"""A rank that is told to end says so, whatever it was doing when the signal came."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import zmq
from eventually import LONG_SECONDS

from megatron_runtime.backends.native.ranked.follower_channel import FollowerChannel
from megatron_runtime.backends.native.ranked.plan_channel import Kind
from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.step_progress import StepProgress
from megatron_runtime.distributed.step_watch import StepWatch


@pytest.fixture
def rank_0() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Its ends: orders out, messages in."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as orders, context.socket(zmq.PULL) as messages:
        orders.bind("inproc://orders")
        messages.bind("inproc://messages")
        messages.setsockopt(zmq.RCVTIMEO, 20_000)
        yield orders, messages


def kind_of(messages: zmq.Socket[bytes]) -> Kind:
    return Kind(unpack(messages.recv_multipart()[0])[0])


@pytest.mark.timeout(60)
def test_a_signal_amid_a_message_is_handed_on(rank_0: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    orders, messages = rank_0
    context = orders.context
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect("inproc://orders")
    push.connect("inproc://messages")
    watch = StepWatch(StepProgress(), step_timeout_seconds=60)
    channel = FollowerChannel(1, pull=pull, push=push, watch=watch, on_lost=pytest.fail)
    orders.send_multipart([pack([int(Kind.WELCOME), 0, 0]), pack(None)])
    channel.start(timeout_seconds=20)
    before = signal.signal(signal.SIGUSR1, lambda *_: channel.leave())
    try:
        with channel._sending:  # as in answer(), on this thread, which signal handlers run on
            signal.raise_signal(signal.SIGUSR1)
        while kind_of(messages) is not Kind.LEAVE:
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    orders.send_multipart([pack([int(Kind.END), 0, 0]), pack(None)])
    assert channel.orders.get(timeout=LONG_SECONDS).kind is Kind.END
    channel.close()
