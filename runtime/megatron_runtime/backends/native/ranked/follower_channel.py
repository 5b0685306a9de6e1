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

from megatron_runtime.backends.native.ranked.plan_channel import DISCONNECTED, Kind, Order, hung
from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.distributed.interpreter_watch import BEAT_SECONDS, HANG_SECONDS, InterpreterWatch, Patience
from megatron_runtime.distributed.step_watch import StepWatch


class FollowerChannel:
    """Another rank's end.

    orders:   what rank 0 wants, in its order; get() blocks.
    watch:    of this rank's steps.
    interpreter: is told twice a second that this process lives.
    on_lost:  called once, on the channel's thread, when rank 0 is lost or says why the engine ends.
    """

    def __init__(
        self,
        rank: int,
        *,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        watch: StepWatch,
        on_lost: Callable[[RankError], None],
        interpreter: InterpreterWatch | None = None,
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._rank = rank
        self._pull = pull
        self._push = push
        self._monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watch = watch
        self._interpreter = interpreter
        self._on_lost = on_lost
        self._number = 0
        self._long: set[int] = set()
        """Orders under way that may hold the interpreter."""
        self._rank_0_is_long = False
        self._is_stuck = False
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
        if order.kind is Kind.LONG_COMMAND:
            with self._sending:
                self._long.discard(order.number)
            self._beat_interpreter()
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
        if self._interpreter is not None:
            self._interpreter.end()
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
        patience = Patience()
        has_said_leave = False
        while not self._ended:
            for socket, _ in poller.poll(max(0, int((beat_at - time.monotonic()) * 1000))):
                if socket is self._pull:
                    heard = time.monotonic()
                    patience.heard(heard, was_long=self._rank_0_is_long or not self._welcomed.is_set())
                    self._receive()
                else:
                    recv_monitor_message(socket)
                    self._lose(0, DISCONNECTED)
            now = time.monotonic()
            if now >= beat_at:
                patience.late(now, now - beat_at)
                if now - beat_at > BEAT_SECONDS:
                    heard = now  # this process itself stood still
                beat_at = now + BEAT_SECONDS
                self._beat()
                if self._is_leaving and not has_said_leave:
                    has_said_leave = True
                    self._send(Kind.LEAVE, 0, None)
                if now - heard > HANG_SECONDS + patience.extra_seconds and not self._rank_0_is_long:
                    self._lose(0, hung(now - heard))

    def _beat(self) -> None:
        self._beat_interpreter()
        cause = self._watch.look()
        self._send(Kind.BEAT, 0, self._watch.report().to_wire())
        if cause is not None and not self._is_stuck:
            self._is_stuck = True
            self.fail(cause, is_consequence=False)

    def _beat_interpreter(self) -> None:
        if self._interpreter is not None and self._welcomed.is_set():
            self._interpreter.beat(is_long=bool(self._long))

    def _receive(self) -> None:
        while True:
            try:
                head, body = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, _, number = unpack(head)
            if kind == Kind.WELCOME:
                self._welcomed.set()
                self._beat_interpreter()
            elif kind == Kind.FAILED:
                self._lose(*unpack(body))
            elif kind == Kind.END:
                self._ended = True
                self.orders.put(Order(Kind.END, 0, None))
            elif kind == Kind.BEAT:
                self._rank_0_is_long = unpack(body)
            else:
                self._number += 1
                if number != self._number:
                    self._lose(0, f"its order {self._number} is missing: order {number} came")
                if kind == Kind.LONG_COMMAND:
                    self._rank_0_is_long = True
                    with self._sending:
                        self._long.add(number)
                    self._beat_interpreter()
                self.orders.put(Order(Kind(kind), number, unpack(body)))

    def _lose(self, rank: int, cause: str) -> None:
        if not self._ended and self._welcomed.is_set():
            self._ended = True
            self._on_lost(RankLostError(rank, cause))
