"""Rank 0's end of the channel between the ranks of an engine. No torch."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.backends.native.ranked.plan_channel import DISCONNECTED, STEPS, Kind, hung
from megatron_runtime.backends.native.ranked.plan_codec import pack, unpack
from megatron_runtime.distributed.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.distributed.interpreter_watch import BEAT_SECONDS, HANG_SECONDS, InterpreterWatch, Patience
from megatron_runtime.distributed.standstill import STANDSTILL_SECONDS, Standstill, behind
from megatron_runtime.distributed.step_progress import Report
from megatron_runtime.distributed.step_watch import WARM_UP_SECONDS, StepWatch

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 2.0
CURRENT_SECONDS = 2 * BEAT_SECONDS
"""What a rank said of itself holds for so long."""
BLAME_SECONDS = 1.0
"""When an exchange fails, how long to wait for the news whose end made it fail."""


@dataclass(slots=True)
class _Rank:
    """What rank 0 knows of another rank.

    silent_since: from then on its silence counts.
    heard:        its last sign of life, which says where it is.
    """

    push: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    silent_since: float
    heard: float = -math.inf
    patience: Patience = field(default_factory=Patience)
    report: Report = field(default_factory=Report)
    has_said_hello: bool = False


@dataclass(slots=True)
class _Pending:
    missing: set[int]
    is_long: bool
    answers: dict[int, Any] = field(default_factory=dict)


class LeaderChannel:
    """Rank 0's end. Orders may be posted and answers awaited from any thread.

    pull:    where the other ranks' answers arrive.
    pushes:  by rank, connected to that rank's PULL.
    watch:   of this rank's own steps.
    interpreter: is told twice a second that this process lives.
    on_lost: called once, on a thread of the channel, with the RankError that ends the engine.
    on_leave: called on a thread of the channel when a rank was told to end: SIGTERM.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        pushes: dict[int, zmq.Socket[bytes]],
        *,
        watch: StepWatch,
        interpreter: InterpreterWatch | None = None,
    ) -> None:
        self.on_lost: Callable[[RankError], None] = lambda _error: None
        self.on_leave: Callable[[], object] = lambda: None
        self.failure: RankError | None = None
        self._pull = pull
        now = time.monotonic()
        self._ranks = {
            rank: _Rank(push, push.get_monitor_socket(zmq.EVENT_DISCONNECTED), silent_since=now)
            for rank, push in pushes.items()
        }
        self._watch = watch
        self._interpreter = interpreter
        self._standstill = Standstill()
        self._number = self._last_step = 0
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
                one.silent_since = time.monotonic()
            self._welcomed = True
        self._beat_interpreter()
        self._send(self._ranks, Kind.WELCOME, 0, None)

    def post(self, kind: Kind, body: Any, *, answers: Iterable[int] = ()) -> int:
        """Send an order to every rank, in the order of calls. Returns its number.

        answers: ranks that will answer; collect() has to be called for it then.
        """
        missing = set(answers) - {0}
        with self._sending:
            self._number += 1
            number = self._number
            with self._changed:
                if missing:
                    self._pending[number] = _Pending(missing, is_long=kind is Kind.LONG_COMMAND)
                if kind in STEPS:
                    self._last_step = number
            if kind is Kind.LONG_COMMAND:
                self._beat_interpreter()
            self._send_now(self._ranks, kind, number, body)
        return number

    def collect(self, number: int) -> dict[int, Any]:
        """The answers to order `number`, by rank. Raises the RankError that ends the engine, if one comes first."""
        with self._changed:
            pending = self._pending.get(number)
            if pending is None:
                return {}
            self._changed.wait_for(lambda: not pending.missing or self.failure is not None)
            del self._pending[number]
            if pending.missing and self.failure is not None:
                raise self.failure
        if pending.is_long:  # at once: what comes now may hang
            self._beat()
        return pending.answers

    def blame(self, number: int) -> RankError:
        """Whose fault it is that an exchange of order `number` failed: the rank that is lost, if the news of it comes
        soon, else the one that the others waited for.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.failure is not None, BLAME_SECONDS):
                reports = self._reports()
                rank = behind(number, reports)
                cause = f"the others waited for it in an exchange that failed; it is in {reports[rank].place}"
                self._lose(rank, cause, by_silence=True)
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
        if self._interpreter is not None:
            self._interpreter.end()
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

    def _reports(self) -> dict[int, Report]:
        return {0: self._watch.report(), **{rank: one.report for rank, one in self._ranks.items()}}

    def _does_long(self) -> bool:
        """Whether an order is under way that may hold interpreters, this one's as well."""
        with self._changed:
            return any(pending.is_long for pending in self._pending.values())

    def _beat(self) -> None:
        """Tell the others, and the watch of this interpreter, that it lives."""
        self._beat_interpreter()
        self._send(self._ranks, Kind.BEAT, 0, self._does_long())

    def _beat_interpreter(self) -> None:
        if self._interpreter is not None and self._welcomed:
            self._interpreter.beat(is_long=self._does_long())

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
            now = time.monotonic()
            if now >= beat_at:
                self._was_late(now, now - beat_at)
                beat_at = now + BEAT_SECONDS
                self._beat()
                self._look_for_hung_ranks()
                self._look_at_steps()

    def _receive(self) -> None:
        while True:
            try:
                head, body = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("a message of another number of frames is dropped")
                continue
            self._take_message(head, body)

    def _take_message(self, head: bytes, body: bytes) -> None:
        try:
            kind, rank, number = unpack(head)
            kind, content = Kind(kind), unpack(body)
            if rank not in self._ranks:
                raise ValueError(f"rank {rank} is none of this engine")
        except (ValueError, TypeError) as error:
            logger.warning("a message that cannot be read is dropped: %s", error)
            return
        with self._changed:
            self._hear(rank, time.monotonic())
            self._take(kind, rank, number, content)
            self._changed.notify_all()

    def _take(self, kind: Kind, rank: int, number: int, body: Any) -> None:
        """`_changed` is held."""
        if kind is Kind.BEAT:
            self._ranks[rank].report = Report.from_wire(body)
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
                self._lose(rank, DISCONNECTED)
            self._changed.notify_all()

    def _hear(self, rank: int, now: float) -> None:
        one = self._ranks[rank]
        one.heard = one.silent_since = now
        one.patience.heard(now, was_long=not self._welcomed or rank in self._doing_long())

    def _doing_long(self) -> set[int]:
        """Ranks that may show no sign of life."""
        return {rank for pending in self._pending.values() if pending.is_long for rank in pending.missing}

    def _was_late(self, now: float, seconds: float) -> None:
        """This process itself looks so late."""
        with self._changed:
            for one in self._ranks.values():
                one.patience.late(now, seconds)
                if seconds > BEAT_SECONDS:
                    one.silent_since = now

    def _look_for_hung_ranks(self) -> None:
        now = time.monotonic()
        with self._changed:
            busy = self._doing_long()
            for rank, one in self._ranks.items():
                if rank in busy:
                    one.silent_since = now
                elif self._welcomed and now - one.silent_since > HANG_SECONDS + one.patience.extra_seconds:
                    self._lose(rank, hung(now - one.silent_since), by_silence=True)
                    self._changed.notify_all()
            if self._suspect is not None and now - self._suspect[2] > BLAME_SECONDS:
                self._lose(self._suspect[0], self._suspect[1], by_silence=True)
                self._changed.notify_all()

    def _look_at_steps(self) -> None:
        cause = self._watch.look()
        with self._changed:
            if cause is not None:
                self._lose(0, cause)
            patience = WARM_UP_SECONDS if self._watch.is_setting_up else STANDSTILL_SECONDS
            now = time.monotonic()
            is_current = all(now - one.heard < CURRENT_SECONDS for one in self._ranks.values())
            stands = self._standstill.look(
                self._last_step, self._reports(), now=now, patience=patience, is_current=is_current
            )
            if stands is not None:
                self._lose(*stands, by_silence=True)
            if self.failure is not None:
                self._changed.notify_all()

    def _lose(self, rank: int, cause: str, *, by_silence: bool = False) -> None:
        """`_changed` is held. The first loss is the cause of those that follow."""
        if self.failure is None:
            self.failure = RankLostError(rank, cause, by_silence=by_silence)
            logger.error("%s", self.failure)
            threading.Thread(target=self.on_lost, args=(self.failure,), name="lost rank", daemon=True).start()
