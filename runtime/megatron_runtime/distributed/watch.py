"""Detection of lost and stalled ranks by heartbeats, the step timeout and the collective timeout. Imports no torch.

- Every rank sends a heartbeat every BEAT_SECONDS. A rank whose last heartbeat is HEARTBEAT_SECONDS old is lost.
- A heartbeat has the progress of the rank's step. If no rank makes progress within the step timeout, the rank for
  which the other ranks wait has stalled the step. If all ranks wait in collectives, the timeout is COLLECTIVE_SECONDS.

The timeouts are much longer than the delays on a loaded machine. See docs/decisions/021.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

BEAT_SECONDS = 0.5
"""Seconds between two heartbeats of a rank."""
HEARTBEAT_SECONDS = 10.0
"""Seconds without a heartbeat after which a rank is lost."""
LONG_ORDER_SECONDS = 600.0
"""Limit that replaces HEARTBEAT_SECONDS during a command that may hold the rank's interpreter lock, such as loading
weights.
"""
COLLECTIVE_SECONDS = 30.0
"""Seconds after which a step is stalled if all ranks wait for each other."""
WARM_UP_SECONDS = 300.0
"""Timeout, in seconds, of each part of a warm-up step. The step compiles kernels and reads the weights for the first
time.
"""


class HeartbeatTimer:
    """A timer that expires if a peer sends no heartbeat. All times are on the clock of time.monotonic().

    allowed_seconds: seconds without a heartbeat after which the timer expires. Each heartbeat sets this number.
    """

    def __init__(self) -> None:
        self.allowed_seconds = HEARTBEAT_SECONDS
        self._last_heartbeat = time.monotonic()

    def restart(self, now: float) -> None:
        """Restart the timer.

        Call this method when a message from the peer arrives, or when this process itself was late.
        """
        self._last_heartbeat = now

    def expired(self, now: float) -> str | None:
        """Return the cause of the loss if the peer has been silent for longer than allowed. Returns None otherwise."""
        silence = now - self._last_heartbeat
        return f"its interpreter has sent no heartbeat for {silence:.1f} s" if silence > self.allowed_seconds else None


class Phase(IntEnum):
    """What the thread that runs steps is doing."""

    IDLE = 0
    COMPUTING = 1
    EXCHANGING = 2  # in a collective, in which it may wait for other ranks


class Report(NamedTuple):
    """The progress of a rank at the time of a heartbeat.

    done:      number of the last command that the rank completed.
    marks:     counter that increases whenever the rank makes progress.
    exchanges: number of collectives that the rank has entered.
    place:     the rank's position in the step, for log messages.
    """

    done: int = 0
    marks: int = 0
    exchanges: int = 0
    phase: Phase = Phase.IDLE
    place: str = "no step"

    @classmethod
    def from_wire(cls, items: list[Any]) -> Report:
        """Return the report whose fields are `items`, in order. A heartbeat contains a report as this list."""
        done, marks, exchanges, phase, place = items
        return cls(done, marks, exchanges, Phase(phase), place)


class StepProgress:
    """The progress of this rank's steps. The thread that runs steps writes it, and the heartbeat thread reads it."""

    def __init__(self) -> None:
        self.done = 0
        self._marks = 0
        self._exchanges = 0
        self._phase = Phase.IDLE
        self._place: tuple[str, int | None] = ("the begin", None)
        self._order = 0

    def begin(self, order: int) -> None:
        """Record that this rank begins a step, which is the command with number `order`."""
        self._order, self._phase = order, Phase.COMPUTING
        self.reach("the begin")

    def reach(self, what: str, number: int | None = None) -> None:
        """Record the current position in the step. what, number: for example "layer" and the index of the layer."""
        self._place = what, number
        self._marks += 1

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Return a context manager. While its `with` block runs, this rank counts as waiting in a collective."""
        self._exchanges += 1
        self._marks += 1
        self._phase = Phase.EXCHANGING
        yield
        self._phase = Phase.COMPUTING
        self._marks += 1

    def end(self, order: int) -> None:
        """Record that this rank has completed the command with number `order`, which may be a step."""
        self.done, self._phase = order, Phase.IDLE

    def report(self) -> Report:
        what, number = self._place
        place = what if number is None else f"{what} {number}"
        if self._phase is Phase.EXCHANGING:
            place = f"exchange {self._exchanges}, of {place},"
        place = "no step" if self._phase is Phase.IDLE else f"{place} of step {self._order}"
        return Report(self.done, self._marks, self._exchanges, self._phase, place)


class Stall(NamedTuple):
    """A step that makes no progress.

    rank:         the rank for which the other ranks wait.
    is_computing: whether at least one rank computes. If False, all ranks wait in collectives.
    """

    rank: int
    cause: str
    is_computing: bool


def rank_behind(order: int, reports: Mapping[int, Report]) -> int:
    """Return the rank for which the other ranks wait.

    The criteria for this rank are, in this order: it has not completed the command with number `order`, it is in no
    collective, and it has entered the fewest collectives.
    """

    def lateness(rank: int) -> tuple[bool, bool, int]:
        report = reports[rank]
        return report.done >= order, report.phase is Phase.EXCHANGING, report.exchanges

    return min(reports, key=lateness)


class StepWatch:
    """Detects from the reports of all ranks which rank stalls a step. It runs on rank 0."""

    def __init__(self, step_timeout_seconds: float) -> None:
        self._step_timeout = step_timeout_seconds
        self._seen: dict[int, Report] = {}
        self._stalled = self._looked_at = 0.0

    def look(self, order: int, reports: Mapping[int, Report], *, now: float, is_warm_up: bool = False) -> Stall | None:
        """Return the stall if no rank has made progress in the command with number `order` within the timeout.

        Returns None otherwise. Call this method every BEAT_SECONDS. If a call is late, at most 2 * BEAT_SECONDS of
        the time since the last call are counted.

        order:      number of the last step that was sent to the ranks.
        reports:    last report of each rank.
        now:        time on the clock of time.monotonic().
        is_warm_up: whether the command is a warm-up step, which has a longer timeout.
        """
        passed = min(now - self._looked_at, 2 * BEAT_SECONDS)
        self._looked_at = now
        late = {rank: report for rank, report in reports.items() if report.done < order}
        if not late or dict(reports) != self._seen:
            self._seen, self._stalled = dict(reports), 0.0
            return None
        self._stalled += passed
        is_computing = any(report.phase is Phase.COMPUTING for report in late.values())
        if is_warm_up:
            limit = max(WARM_UP_SECONDS, self._step_timeout)
        else:
            limit = self._step_timeout if is_computing else min(COLLECTIVE_SECONDS, self._step_timeout)
        if self._stalled < limit:
            return None
        places = "; ".join(f"rank {rank} is in {report.place}" for rank, report in sorted(late.items()))
        cause = f"no rank has made progress for {self._stalled:.1f} s, and the others wait for this one: {places}"
        return Stall(rank_behind(order, late), cause, is_computing)
