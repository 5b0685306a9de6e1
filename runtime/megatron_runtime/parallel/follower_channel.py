"""The end of any other rank of the channel between the ranks of an engine. No torch."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.parallel.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.parallel.plan_channel import BEAT_SECONDS, DISCONNECTED, Kind, Order
from megatron_runtime.parallel.plan_codec import pack, unpack

LONGEST_LOAD_SECONDS = 600.0
"""Rank 0 may hold its interpreter while it loads; that its process lives, ZeroMQ's heartbeats tell."""


class FollowerChannel:
    """Another rank's end.

    orders:   what rank 0 wants, in its order; get() blocks.
    exchanges: tells how many exchanges this rank has entered, and whether it waits in one; read twice a second.
    done:     the last order that was done.
    on_lost:  called once, on the channel's thread, when rank 0 is lost or says why the engine ends.
    """

    def __init__(
        self,
        rank: int,
        *,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        exchanges: Callable[[], tuple[int, bool]],
        on_lost: Callable[[RankError], None],
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._rank = rank
        self._pull = pull
        self._push = push
        self._monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._exchanges = exchanges
        self._on_lost = on_lost
        self.done = 0
        self._number = 0
        self._sending = threading.Lock()
        self._is_leaving = False
        self._welcomed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)

    def start(self, *, timeout_seconds: float) -> None:
        """Return when rank 0 has welcomed this rank. Raises RendezvousError."""
        self._thread.start()
        self._send(Kind.HELLO, 0, None)
        if not self._welcomed.wait(timeout_seconds):
            raise RendezvousError(
                self._rank, f"it has found rank 0, but no message came through within {timeout_seconds:g} s"
            )

    def answer(self, order: Order, body: Any) -> None:
        self._send(Kind.ANSWER, order.number, body)

    def fail(self, cause: str, *, is_consequence: bool) -> None:
        """This rank cannot go on. is_consequence: another rank's end explains it."""
        self._send(Kind.FAILED, 0, [is_consequence, cause])

    def leave(self) -> None:
        """This rank was told to end: rank 0 drains the engine first. Safe in a signal handler, which may have
        interrupted a message that is being sent: the channel's thread says it, with its next beat."""
        self._is_leaving = True

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._push.disable_monitor()
        for socket in (self._monitor, self._push, self._pull):
            socket.close(linger=0)

    def _send(self, kind: Kind, number: int, body: Any) -> None:
        with self._sending, contextlib.suppress(zmq.Again):  # a PUSH without a connection: rank 0 is gone
            self._push.send_multipart([pack([int(kind), self._rank, number]), pack(body)], zmq.NOBLOCK)

    # --- its thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        heard = beat_at = time.monotonic()
        has_said_leave = False
        while not self._ended:
            for socket, _ in poller.poll(max(0, int((beat_at - time.monotonic()) * 1000))):
                if socket is self._pull:
                    self._receive()
                    heard = time.monotonic()
                else:
                    recv_monitor_message(socket)
                    self._lose(0, DISCONNECTED)
            now = time.monotonic()
            if now >= beat_at:
                if now - beat_at > BEAT_SECONDS:
                    heard = now  # this process itself stood still
                beat_at = now + BEAT_SECONDS
                self._send(Kind.BEAT, 0, [self.done, *self._exchanges()])
                if self._is_leaving and not has_said_leave:
                    has_said_leave = True
                    self._send(Kind.LEAVE, 0, None)
                if now - heard > LONGEST_LOAD_SECONDS:
                    self._lose(0, f"it has said nothing for {LONGEST_LOAD_SECONDS:g} s")

    def _receive(self) -> None:
        while True:
            try:
                head, body = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, _, number = unpack(head)
            if kind == Kind.WELCOME:
                self._welcomed.set()
            elif kind == Kind.FAILED:
                self._lose(*unpack(body))
            elif kind == Kind.END:
                self._ended = True
                self.orders.put(Order(Kind.END, 0, None))
            elif kind != Kind.BEAT:
                self._number += 1
                if number != self._number:
                    self._lose(0, f"its order {self._number} is missing: order {number} came")
                self.orders.put(Order(Kind(kind), number, unpack(body)))

    def _lose(self, rank: int, cause: str) -> None:
        if not self._ended and self._welcomed.is_set():
            self._ended = True
            self._on_lost(RankLostError(rank, cause))
