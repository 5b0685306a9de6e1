"""The channel between rank 0 and the other ranks of an engine: ordered, numbered messages one way, answers the other.

PUSH and PULL, one pair a direction and rank: nothing is lost to a late joiner, and an idle rank blocks in receive. Two
watches run beside: ZeroMQ's own heartbeats, whose I/O thread beats whatever Python does, end the connection of a
process that is gone, stopped or cut off; messages every half second tell how far a rank has come. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.parallel.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.parallel.plan_codec import pack, unpack

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 3.0
"""A connection over which nothing came for so long is closed, and its rank is lost."""
HANG_SECONDS = 30.0
"""A rank whose interpreter answers nothing for so long is lost, unless it was told to do something long. A compiler may
hold an interpreter for seconds.
"""
LONGEST_LOAD_SECONDS = 600.0
"""Rank 0 may hold its interpreter while it loads; that its process lives, ZeroMQ's heartbeats tell."""
FAREWELL_SECONDS = 2.0
BLAME_SECONDS = 1.0
"""When a collective fails, how long to wait for the news whose end made it fail."""


_STALLED = "it has not got on in a step, and the others waited for it"
_DISCONNECTED = f"its connection ended: the process is gone, stopped for {SILENCE_SECONDS:g} s, or cut off"


class Kind(IntEnum):
    """From rank 0: STEP, COMMAND, END, BEAT, WELCOME. To rank 0: HELLO, ANSWER, BEAT, FAILED, LEAVE."""

    STEP = 1
    COMMAND = 2
    END = 3
    BEAT = 4
    WELCOME = 5
    HELLO = 6
    ANSWER = 7
    FAILED = 8
    LEAVE = 9


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 wants of a rank. Numbers rise by one."""

    kind: Kind
    number: int
    body: Any


Progress: TypeAlias = tuple[int, int, bool]
"""How far a rank has come: the last order it has done, the exchanges it has entered, whether it waits in one."""


@dataclass(slots=True)
class _Rank:
    """What rank 0 knows of another rank."""

    push: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    heard: float
    progress: Progress = (0, 0, False)
    has_said_hello: bool = False


@dataclass(slots=True)
class _Pending:
    missing: set[int]
    is_long: bool
    answers: dict[int, Any] = field(default_factory=dict)


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


class LeaderChannel:
    """Rank 0's end. Orders may be posted and answers awaited from any thread.

    pull:    where the other ranks' answers arrive.
    pushes:  by rank, connected to that rank's PULL.
    on_lost: called once, on a thread of the channel, with the RankError that ends the engine.
    on_leave: called on a thread of the channel when a rank was told to end: SIGTERM.
    """

    def __init__(self, pull: zmq.Socket[bytes], pushes: dict[int, zmq.Socket[bytes]]) -> None:
        self.on_lost: Callable[[RankError], None] = lambda _error: None
        self.on_leave: Callable[[], object] = lambda: None
        self.failure: RankError | None = None
        self._pull = pull
        now = time.monotonic()
        self._ranks = {
            rank: _Rank(push, push.get_monitor_socket(zmq.EVENT_DISCONNECTED), heard=now)
            for rank, push in pushes.items()
        }
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._ended = False
        self._closing = False
        self._gone: set[int] = set()
        self._suspect: tuple[int, str, float] | None = None
        self._welcomed = False
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self, *, timeout_seconds: float) -> None:
        """Return when every rank has said HELLO and was welcomed. Raises RendezvousError naming who did not."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or all(one.has_said_hello for one in self._ranks.values()), timeout_seconds
            )
            if self.failure is not None:
                raise self.failure
            silent = [rank for rank, one in self._ranks.items() if not one.has_said_hello]
            if silent:
                raise RendezvousError(
                    silent[0],
                    f"it and rank 0 have found each other, but no message came through within {timeout_seconds:g} s",
                )
            for one in self._ranks.values():
                one.heard = time.monotonic()
            self._welcomed = True
        self._send(self._ranks, Kind.WELCOME, 0, None)

    def post(self, kind: Kind, body: Any, *, answers: Iterable[int] = (), is_long: bool = False) -> int:
        """Send an order to every rank, in the order of calls. Returns its number.

        answers: ranks that will answer; collect() has to be called for it then.
        is_long: the order may keep a rank from showing any sign of life.
        """
        missing = set(answers) - {0}
        with self._sending:
            self._number += 1
            number = self._number
            if missing:
                with self._changed:
                    self._pending[number] = _Pending(missing, is_long)
            self._send_now(self._ranks, kind, number, body)
        return number

    def collect(self, number: int, *, stall_seconds: float | None = None) -> dict[int, Any]:
        """The answers to order `number`, by rank. Raises the RankError that ends the engine, if one comes first.

        stall_seconds: when no answer and no progress came for so long, the rank that is behind is lost.
        """
        with self._changed:
            pending = self._pending.get(number)
            if pending is None:
                return {}
            seen, since = self._progress(), time.monotonic()
            while pending.missing and self.failure is None:
                self._changed.wait(timeout=BEAT_SECONDS)
                if self._progress() != seen:
                    seen, since = self._progress(), time.monotonic()
                elif stall_seconds is not None and time.monotonic() - since > stall_seconds:
                    self._lose(self._behind(number), _STALLED)
            del self._pending[number]
            if pending.missing and self.failure is not None:
                raise self.failure
            return pending.answers

    def blame(self, number: int) -> RankError:
        """Whose fault it is that an exchange of order `number` failed: the rank that is lost, if the news of it comes
        soon, else the one that the others waited for.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.failure is not None, BLAME_SECONDS):
                self._lose(self._behind(number), _STALLED)
            assert self.failure is not None
            return self.failure

    def fail(self, rank: int, cause: str) -> None:
        """The engine ends because of `rank`, which may be 0: the other ranks end with this cause. Waits a moment for it
        to reach them.
        """
        self._closing = True
        self._send(self._ranks, Kind.FAILED, 0, [rank, cause])
        self._wait_until_all_are_gone(BLAME_SECONDS)

    def close(self) -> None:
        """Tell the other ranks to end, wait a moment for them to hang up, and end. Idempotent."""
        if self._ended:
            return
        self._closing = True
        self._send(self._ranks, Kind.END, 0, None)
        self._wait_until_all_are_gone(FAREWELL_SECONDS)
        self._ended = True
        self._thread.join()
        for one in self._ranks.values():
            one.push.disable_monitor()
            one.monitor.close(linger=0)
            one.push.close(linger=0)
        self._pull.close(linger=0)

    def _wait_until_all_are_gone(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gone >= self._ranks.keys(), seconds)

    def _send(self, ranks: Iterable[int], kind: Kind, number: int, body: Any) -> None:
        with self._sending:
            self._send_now(ranks, kind, number, body)

    def _send_now(self, ranks: Iterable[int], kind: Kind, number: int, body: Any) -> None:
        """`_sending` is held: it orders the messages, and lets a socket pass from thread to thread."""
        if self._ended:
            return
        frames = [pack([int(kind), 0, number]), pack(body)]
        for rank in ranks:
            with contextlib.suppress(zmq.Again):  # its connection has ended, which the monitor tells
                self._ranks[rank].push.send_multipart(frames, zmq.NOBLOCK)

    def _progress(self) -> tuple[Progress, ...]:
        return tuple(one.progress for one in self._ranks.values())

    def _behind(self, number: int) -> int:
        """The rank that the others wait for in order `number`: it has not done it, and is not waiting itself."""

        def lateness(rank: int) -> tuple[bool, bool, int]:
            done, exchanges, is_waiting = self._ranks[rank].progress
            return done >= number, is_waiting, exchanges

        return min(self._ranks, key=lateness)

    # --- its thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        monitors = {one.monitor: rank for rank, one in self._ranks.items()}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        beat_at = time.monotonic()
        while not self._ended:
            for socket, _ in poller.poll(max(0, int((beat_at - time.monotonic()) * 1000))):
                if socket is self._pull:
                    self._receive()
                else:
                    recv_monitor_message(socket)
                    self._disconnected(monitors[socket])
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_SECONDS
                self._send(self._ranks, Kind.BEAT, 0, None)
                self._look_for_hung_ranks()

    def _receive(self) -> None:
        while True:
            try:
                head, body = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, rank, number = unpack(head)
            with self._changed:
                self._ranks[rank].heard = time.monotonic()
                self._take(Kind(kind), rank, number, unpack(body))
                self._changed.notify_all()

    def _take(self, kind: Kind, rank: int, number: int, body: Any) -> None:
        """`_changed` is held."""
        if kind is Kind.BEAT:
            done, exchanges, is_waiting = body
            self._ranks[rank].progress = (done, exchanges, is_waiting)
        elif kind is Kind.ANSWER:
            pending = self._pending.get(number)
            if pending is not None:
                pending.missing.discard(rank)
                pending.answers[rank] = body
        elif kind is Kind.HELLO:
            self._ranks[rank].has_said_hello = True
        elif kind is Kind.FAILED:
            is_consequence, cause = body
            if not is_consequence:
                self._lose(rank, cause)
            elif self._suspect is None:
                self._suspect = (rank, cause, time.monotonic())
        elif kind is Kind.LEAVE:
            self.on_leave()

    def _disconnected(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            if self._welcomed and not self._closing:
                self._lose(rank, _DISCONNECTED)
            self._changed.notify_all()

    def _look_for_hung_ranks(self) -> None:
        now = time.monotonic()
        with self._changed:
            busy = {rank for pending in self._pending.values() if pending.is_long for rank in pending.missing}
            for rank, one in self._ranks.items():
                if rank in busy:
                    one.heard = now
                elif self._welcomed and now - one.heard > HANG_SECONDS:
                    self._lose(rank, f"its interpreter has not answered for {HANG_SECONDS:g} s")
                    self._changed.notify_all()
            if self._suspect is not None and now - self._suspect[2] > BLAME_SECONDS:
                self._lose(self._suspect[0], self._suspect[1])
                self._changed.notify_all()

    def _lose(self, rank: int, cause: str) -> None:
        """`_changed` is held. The first loss is the cause of those that follow."""
        if self.failure is None:
            self.failure = RankLostError(rank, cause)
            logger.error("%s", self.failure)
            threading.Thread(target=self.on_lost, args=(self.failure,), name="lost rank", daemon=True).start()


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
        """This rank was told to end: rank 0 drains the engine first."""
        self._send(Kind.LEAVE, 0, None)

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
        while not self._ended:
            for socket, _ in poller.poll(max(0, int((beat_at - time.monotonic()) * 1000))):
                if socket is self._pull:
                    self._receive()
                    heard = time.monotonic()
                else:
                    recv_monitor_message(socket)
                    self._lose(0, _DISCONNECTED)
            now = time.monotonic()
            if now >= beat_at:
                if now - beat_at > BEAT_SECONDS:
                    heard = now  # this process itself stood still
                beat_at = now + BEAT_SECONDS
                self._send(Kind.BEAT, 0, [self.done, *self._exchanges()])
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
