"""The channel between rank 0 and the other ranks of an engine: ordered, numbered messages one way, answers the other.

PUSH and PULL, one pair a direction and rank: nothing is lost to a late joiner, and an idle rank blocks in receive. Two
watches run beside: ZeroMQ's own heartbeats, whose I/O thread beats whatever Python does, end the connection of a
process that is gone, stopped or cut off; messages every half second tell that an interpreter lives, and how far its
rank has come. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import zmq

from megatron_runtime.distributed.interpreter_watch import BEAT_SECONDS

SILENCE_SECONDS = 3.0
"""A connection over which nothing came for so long is closed, and its rank is lost."""
DISCONNECTED = f"its connection ended: the process is gone, stopped for {SILENCE_SECONDS:g} s, or cut off"


def hung(seconds: float) -> str:
    return f"its interpreter has not answered for {seconds:.1f} s"


class Kind(IntEnum):
    """From rank 0: STEP, WARM_UP, COMMAND, LONG_COMMAND, END, BEAT, WELCOME.
    To rank 0: HELLO, ANSWER, BEAT, FAILED, LEAVE.

    WARM_UP: a step of no request, of which nobody knows yet how long it takes.
    LONG_COMMAND: an interpreter may show no sign of life until it is done.
    """

    STEP = 1
    COMMAND = 2
    END = 3
    BEAT = 4
    WELCOME = 5
    HELLO = 6
    ANSWER = 7
    FAILED = 8
    LEAVE = 9
    LONG_COMMAND = 10
    WARM_UP = 11


STEPS = frozenset({Kind.STEP, Kind.WARM_UP})


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 wants of a rank. Numbers rise by one."""

    kind: Kind
    number: int
    body: Any


def push_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Unconnected. It never blocks, and closes a connection that has fallen silent."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    _watch(socket)
    return socket


def pull_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Unbound."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    _watch(socket)
    return socket


def _watch(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000))
