"""A rank that receives SIGTERM requests rank 0 to end the engine, whatever it does when the signal arrives."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import zmq
from eventually import LONG_SECONDS

from megatron_runtime.backends.native.ranked.channel import FollowerChannel, Kind
from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.watch import StepProgress


@pytest.fixture
def rank_0() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """The sockets of rank 0: orders out, messages in."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as orders, context.socket(zmq.PULL) as messages:
        orders.bind("inproc://orders")
        messages.bind("inproc://messages")
        messages.setsockopt(zmq.RCVTIMEO, 20_000)
        yield orders, messages


def kind_of(messages: zmq.Socket[bytes]) -> Kind:
    return Kind(unpack(messages.recv_multipart()[0])[0])


@pytest.mark.timeout(60)
def test_a_signal_while_a_message_is_sent_is_forwarded(rank_0: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    orders, messages = rank_0
    context = orders.context
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect("inproc://orders")
    push.connect("inproc://messages")
    channel = FollowerChannel(1, pull=pull, push=push, progress=StepProgress(), on_lost=pytest.fail)
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
