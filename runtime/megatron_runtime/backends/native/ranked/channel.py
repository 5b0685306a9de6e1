"""The channel between rank 0 of an engine (the leader) and the engine's other ranks (the followers).

The leader sends numbered commands ("orders"), and the followers send answers. Every rank has one PULL socket, and one
PUSH socket per peer. An idle rank blocks in receive, and a rank that connects late still gets every message. Each rank
has a thread that receives messages, sends heartbeats and detects three kinds of loss:

- A process has exited, was stopped or has lost its network. ZeroMQ reports the end of its connection.
- An interpreter hangs. Its heartbeats stop, while ZeroMQ's I/O thread continues. See distributed/watch.py.
- A step makes no progress. Rank 0 compares the progress reports in the heartbeats.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.backends.native.ranked.plan_codec import pack, pack_frames, unpack, unpack_frames
from megatron_runtime.distributed.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.distributed.rendezvous import SILENCE_SECONDS
from megatron_runtime.distributed.watch import (
    BEAT_SECONDS,
    HEARTBEAT_SECONDS,
    LONG_ORDER_SECONDS,
    HeartbeatTimer,
    Report,
    StepProgress,
    StepWatch,
    rank_behind,
)

logger = logging.getLogger(__name__)

DISCONNECTED = (
    f"its connection closed: the process has exited, was stopped for {SILENCE_SECONDS:g} s, or has no network"
)
CLOSE_SECONDS = 2.0
"""Maximum seconds that close() waits for the other ranks to disconnect."""
BLAME_SECONDS = 1.0
"""Maximum seconds to wait, after a failed collective, for the detection of the lost rank that caused it."""
WATCHDOG_MARGIN_SECONDS = 5.0
"""Seconds after which a hung process terminates itself, counted from the time at which other ranks consider it lost."""
WATCHDOG_RENEWAL_SECONDS = 2.0


class Kind(IntEnum):
    """The kind of a message.

    Rank 0 sends STEP, WARM_UP, COMMAND, BLOCKS, STATE, END, BEAT and WELCOME. It receives HELLO, ANSWER, BEAT, FAILED
    and LEAVE.

    WARM_UP: a step without requests.
    COMMAND: an order that can hold the interpreter lock for long, for example to release much memory. Until the rank
             has completed it, the heartbeat timeout is LONG_ORDER_SECONDS.
    STATE:   the engine has entered a lifecycle state.
    BLOCKS:  an order that reads or writes blocks of the KV cache.
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
    WARM_UP = 10
    STATE = 11
    BLOCKS = 12


STEPS = frozenset({Kind.STEP, Kind.WARM_UP})


@dataclass(frozen=True, slots=True)
class Message:
    """A message between rank 0 and another rank.

    rank:   rank of the sender.
    number: number of an order, counted from 1. An answer has the number of its order. 0 for other messages.
    body:   for a heartbeat, the timeout in seconds until the next heartbeat, and the sender's Report.
    """

    kind: Kind
    rank: int
    number: int
    body: Any


@dataclass(slots=True)
class _Peer:
    """The state of the rank at the other end of a connection."""

    push: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    heartbeat: HeartbeatTimer = field(default_factory=HeartbeatTimer)
    report: Report = field(default_factory=Report)


class _Channel:
    """The base class of LeaderChannel and FollowerChannel. It has the sockets, the thread and the heartbeats.

    `_handlers` maps each kind of message to its handler.
    """

    def __init__(
        self,
        rank: int,
        pull: zmq.Socket[bytes],
        pushes: Mapping[int, zmq.Socket[bytes]],
        *,
        progress: StepProgress,
        has_watchdog: bool,
    ) -> None:
        self._rank = rank
        self._pull = pull
        self._peers = {
            peer: _Peer(push, push.get_monitor_socket(zmq.EVENT_DISCONNECTED)) for peer, push in pushes.items()
        }
        self._progress = progress
        self._has_watchdog = has_watchdog
        self._watchdog_set: tuple[float, float] = (0.0, 0.0)
        self._handlers: dict[Kind, Callable[[Message], object]] = {Kind.BEAT: self._note_heartbeat}
        self._commands: set[int] = set()
        """Numbers of the commands in progress."""
        self._number = 0
        self._sending = threading.RLock()
        """Held while a message is sent.

        This keeps messages in order and makes the sockets safe to use on any thread.
        """
        self._welcomed = threading.Event()
        """Set when all ranks are connected. From then on, a lost peer stops the engine."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def _lose(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        raise NotImplementedError

    def _disconnected(self, rank: int) -> None:
        self._lose(rank, DISCONNECTED)

    def _dispatch(self, message: Message) -> None:
        handler = self._handlers.get(message.kind)
        if handler is None:
            logger.warning("rank %d sent %s to rank %d: message dropped", message.rank, message.kind.name, self._rank)
        else:
            handler(message)

    def _check_peers(self, now: float) -> None:
        """Handle the loss of each peer whose heartbeat is overdue. Called on the channel's thread."""
        for rank, peer in self._peers.items():
            cause = peer.heartbeat.expired(now)
            if cause is not None and self._welcomed.is_set():
                self._lose(rank, cause, by_silence=True)

    # --- sending ---

    def _send(self, kind: Kind, number: int, body: Any, by_rank: Mapping[int, Any] | None = None) -> None:
        with self._sending:
            header, common = pack([int(kind), self._rank, number]), pack_frames(body)
            own = {rank: pack_frames(other) for rank, other in (by_rank or {}).items()}
            for rank, peer in self._peers.items():
                if not peer.push.closed:
                    with contextlib.suppress(zmq.Again):  # the connection has ended, which the monitor reports
                        peer.push.send_multipart([header, *own.get(rank, common)], zmq.NOBLOCK, copy=False)

    def _beat(self) -> None:
        """Send a heartbeat and rearm the watchdog, which can terminate this process even if the interpreter hangs."""
        with self._sending:
            allowed = LONG_ORDER_SECONDS if self._commands else HEARTBEAT_SECONDS
            self._send(Kind.BEAT, 0, [allowed, self._progress.report()])
            now, (was_allowed, set_at) = time.monotonic(), self._watchdog_set
            is_due = allowed != was_allowed or now - set_at > WATCHDOG_RENEWAL_SECONDS
            if self._has_watchdog and self._welcomed.is_set() and is_due:
                faulthandler.dump_traceback_later(allowed + WATCHDOG_MARGIN_SECONDS, exit=True)
                self._watchdog_set = (allowed, now)

    def _begin_command(self, number: int) -> None:
        """Send the peers a heartbeat that grants a longer timeout until _end_command().

        Call this before command `number` begins, because a command can hold the interpreter lock for a long time.
        """
        with self._sending:
            self._commands.add(number)
            self._beat()

    def _end_command(self, number: int) -> None:
        with self._sending:
            if number in self._commands:
                self._commands.discard(number)
                self._beat()

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        self._ended = True
        self._thread.join()
        if self._has_watchdog:
            faulthandler.cancel_dump_traceback_later()
        with self._sending:
            for peer in self._peers.values():
                peer.push.disable_monitor()
                peer.monitor.close(linger=0)
                peer.push.close(linger=0)
            self._pull.close(linger=0)

    # --- its thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        monitors = {peer.monitor: rank for rank, peer in self._peers.items()}
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
            now = time.monotonic()
            if now >= beat_at:
                if now - beat_at > BEAT_SECONDS:  # this process was stalled, so heartbeats may wait in its sockets
                    for peer in self._peers.values():
                        peer.heartbeat.restart(now)
                beat_at = now + BEAT_SECONDS
                self._beat()
                self._check_peers(now)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                header, *body = frames
                kind, rank, number = unpack(header)
                message = Message(Kind(kind), rank, number, unpack_frames(body))
                if rank not in self._peers:
                    raise ValueError(f"rank {rank} is not a peer of rank {self._rank}")
            except (ValueError, TypeError) as error:
                logger.warning("malformed message dropped: %s", error)
                continue
            self._peers[rank].heartbeat.restart(time.monotonic())
            self._dispatch(message)

    def _note_heartbeat(self, message: Message) -> None:
        peer = self._peers[message.rank]
        peer.heartbeat.allowed_seconds, report = message.body
        peer.report = Report.from_wire(report)


class LeaderChannel(_Channel):
    """Rank 0's end of the channel. All public methods may be called on any thread.

    pull:         socket that receives the messages of the other ranks.
    pushes:       PUSH sockets by rank. Each is connected to the PULL socket of its rank.
    progress:     progress of this rank's steps.
    has_watchdog: whether to terminate this process if its interpreter hangs.
    on_lost:      called once, on a separate thread, with the RankError that stops the engine.
    on_leave:     called on the channel's thread when another rank has received SIGTERM.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        pushes: Mapping[int, zmq.Socket[bytes]],
        *,
        progress: StepProgress,
        step_timeout_seconds: float,
        has_watchdog: bool = False,
    ) -> None:
        super().__init__(0, pull, pushes, progress=progress, has_watchdog=has_watchdog)
        self.on_lost: Callable[[RankError], None] = lambda _error: None
        self.on_leave: Callable[[], object] = lambda: None
        self.failure: RankError | None = None
        self._missing = set(pushes)
        """Ranks that have not sent HELLO."""
        self._answers: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        """Answers to the orders for which collect() waits, by order number and rank."""
        handlers: dict[Kind, Callable[[Message], object]] = {
            Kind.HELLO: lambda message: self._missing.discard(message.rank),
            Kind.ANSWER: lambda message: self._answers[message.number].update({message.rank: message.body}),
            Kind.FAILED: self._note_failure,
            Kind.LEAVE: lambda _message: self.on_leave(),
        }
        self._handlers |= handlers
        self._watch = StepWatch(step_timeout_seconds)
        self._last_step: tuple[int, Kind] = (0, Kind.STEP)
        self._changed = threading.Condition()
        self._closing = False
        self._gone: set[int] = set()
        """Ranks whose connection has ended."""
        self._suspect: tuple[int, str, float] | None = None
        """The first rank that reported a failed collective, with the cause and the time of the report."""

    def start(self, *, timeout_seconds: float) -> None:
        """Wait for the HELLO of every rank, and send WELCOME.

        Raises RendezvousError if a rank is missing after the timeout.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._missing, timeout_seconds)
            if self.failure is not None:
                raise self.failure
            if self._missing:
                cause = f"connected to rank 0, but sent no message within {timeout_seconds:g} s"
                raise RendezvousError(min(self._missing), cause)
            for peer in self._peers.values():
                peer.heartbeat.restart(time.monotonic())
            self._welcomed.set()
        self._send(Kind.WELCOME, 0, None)
        self._beat()

    def post(self, kind: Kind, body: Any, by_rank: Mapping[int, Any] | None = None) -> int:
        """Send an order to every rank, and return its number. Orders arrive in the sequence of the calls.

        by_rank: bodies that replace `body` for some ranks.
        """
        with self._sending:
            self._number += 1
            number = self._number
            if kind in STEPS:
                with self._changed:
                    self._last_step = (number, kind)
            if kind is Kind.COMMAND:
                self._begin_command(number)
            self._send(kind, number, body, by_rank)
        return number

    def share_state(self, state: str, *, has_joined: bool) -> None:
        """Send the engine's EngineState to the other ranks.

        has_joined: whether the engine serves, and has reached the lifecycle state that the coordinator requires.
        """
        self._send(Kind.STATE, 0, [state, has_joined])

    def collect(self, number: int, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait for the answers of `ranks` to order `number`, and return the answers by rank. Rank 0 does not answer.

        Raises RankError if the engine fails before all answers have arrived.
        """
        wanted = set(ranks) - {0}
        with self._changed:
            self._changed.wait_for(lambda: self._answers[number].keys() >= wanted or self.failure is not None)
            answers = self._answers.pop(number)
            if self.failure is not None and not answers.keys() >= wanted:
                raise self.failure
        self._end_command(number)
        return answers

    def blame(self, number: int) -> RankError:
        """Return the error of the rank that made a collective operation of order `number` fail.

        The error names the first rank that is lost. If no rank is lost within BLAME_SECONDS, the error names the rank
        for which the other ranks waited.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.failure is not None, BLAME_SECONDS):
                reports = self._reports()
                rank = rank_behind(number, reports)
                cause = f"the other ranks waited for it in a collective that failed; it is in {reports[rank].place}"
                self._lose(rank, cause, by_silence=True)
            assert self.failure is not None
            return self.failure

    def fail(self, rank: int, cause: str) -> None:
        """Stop the other ranks because `rank` has failed, and wait up to BLAME_SECONDS for them to exit.

        rank:  the rank that failed; it can be 0.
        cause: text that is sent to the other ranks.
        """
        self._closing = True
        self._send(Kind.FAILED, 0, [rank, cause])
        self._wait_until_all_are_gone(BLAME_SECONDS)

    def close(self) -> None:
        """Stop the other ranks without an error, and close this end. Idempotent."""
        if self._ended:
            return
        self._closing = True
        self._send(Kind.END, 0, None)
        self._wait_until_all_are_gone(CLOSE_SECONDS)
        super().close()

    def _wait_until_all_are_gone(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gone >= self._peers.keys(), seconds)

    def _reports(self) -> dict[int, Report]:
        return {0: self._progress.report(), **{rank: peer.report for rank, peer in self._peers.items()}}

    # --- its thread ---

    def _dispatch(self, message: Message) -> None:
        with self._changed:
            super()._dispatch(message)
            self._changed.notify_all()

    def _note_failure(self, message: Message) -> None:
        is_consequence, cause = message.body
        if not is_consequence:
            self._lose(message.rank, cause)
        elif self._suspect is None:
            self._suspect = (message.rank, cause, time.monotonic())

    def _disconnected(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            if self._welcomed.is_set() and not self._closing:
                self._lose(rank, DISCONNECTED)
            self._changed.notify_all()

    def _check_peers(self, now: float) -> None:
        with self._changed:
            super()._check_peers(now)
            if self._suspect is not None and now - self._suspect[2] > BLAME_SECONDS:
                self._lose(self._suspect[0], self._suspect[1], by_silence=True)
            number, kind = self._last_step
            stall = self._watch.look(number, self._reports(), now=now, is_warm_up=kind is Kind.WARM_UP)
            if stall is not None:
                self._lose(stall.rank, stall.cause, by_silence=not stall.is_computing)

    def _lose(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        """Record that `rank` is lost, and make the engine fail. If a rank was lost before, this method has no effect.

        The caller must hold `_changed`.

        by_silence: as in RankLostError.
        """
        if self.failure is None:
            self.failure = RankLostError(rank, cause, by_silence=by_silence)
            logger.error("%s", self.failure)
            self._changed.notify_all()
            threading.Thread(target=self.on_lost, args=(self.failure,), name="lost rank", daemon=True).start()


class FollowerChannel(_Channel):
    """The channel's end at a rank other than rank 0.

    orders:       queue of the orders from rank 0; get() blocks.
    progress:     progress of this rank's steps.
    has_watchdog: whether to terminate this process if its interpreter hangs.
    on_lost:      called once, on the channel's thread, when rank 0 is lost or reports the cause of an engine failure.
    """

    def __init__(
        self,
        rank: int,
        *,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        progress: StepProgress,
        on_lost: Callable[[RankError], None],
        has_watchdog: bool = False,
    ) -> None:
        super().__init__(rank, pull, {0: push}, progress=progress, has_watchdog=has_watchdog)
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_state: Callable[[str, bool], object] = lambda _state, _has_joined: None
        """Called on the channel's thread with the arguments of share_state()."""
        self._on_lost = on_lost
        self._is_leaving = self._has_sent_leave = False
        handlers: dict[Kind, Callable[[Message], object]] = {
            Kind.WELCOME: lambda _message: self._welcomed.set(),
            Kind.FAILED: lambda message: self._lose(*message.body),
            Kind.STATE: lambda message: self.on_state(*message.body),
            Kind.END: self._note_end,
            **dict.fromkeys((*STEPS, Kind.COMMAND, Kind.BLOCKS), self._note_order),
        }
        self._handlers |= handlers

    def start(self, *, timeout_seconds: float) -> None:
        """Send HELLO, and wait for WELCOME. Raises RendezvousError if rank 0 does not answer within the timeout."""
        self._thread.start()
        self._send(Kind.HELLO, 0, None)
        if not self._welcomed.wait(timeout_seconds):
            raise RendezvousError(self._rank, f"connected to rank 0, but received no message in {timeout_seconds:g} s")
        self._beat()  # starts the watchdog

    def answer(self, order: Message, body: Any) -> None:
        self._send(Kind.ANSWER, order.number, body)
        self._end_command(order.number)

    def fail(self, cause: str, *, is_consequence: bool) -> None:
        """Report to rank 0 that this rank has failed.

        is_consequence: whether the failure can be a consequence of the loss of another rank.
        """
        self._send(Kind.FAILED, 0, [is_consequence, cause])

    def leave(self) -> None:
        """Ask rank 0, with the next heartbeat, to drain and stop the engine.

        This method takes no lock, so a signal handler can call it even if the handler interrupts a send.
        """
        self._is_leaving = True

    def _check_peers(self, now: float) -> None:
        if self._is_leaving and not self._has_sent_leave:
            self._has_sent_leave = True
            self._send(Kind.LEAVE, 0, None)
        super()._check_peers(now)

    def _note_end(self, message: Message) -> None:
        self._ended = True
        self.orders.put(message)

    def _note_order(self, order: Message) -> None:
        self._number += 1
        if order.number != self._number:
            self._lose(0, f"order {order.number} arrived, but order {self._number} is missing")
        if order.kind is Kind.COMMAND:
            self._begin_command(order.number)
        self.orders.put(order)

    def _lose(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        if not self._ended and self._welcomed.is_set():
            self._ended = True
            self._on_lost(RankLostError(rank, cause, by_silence=by_silence))
