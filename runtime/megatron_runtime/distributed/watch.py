"""How a lost or stalled rank is found: heartbeats, the step timeout and the collective timeout. No torch.

- Every rank sends a heartbeat every BEAT_SECONDS. A rank whose heartbeat is HEARTBEAT_SECONDS old is lost.
- A heartbeat carries the progress of the rank's step. If no rank makes progress for the step timeout, the step is
  stalled by the rank that the others wait for. If every rank waits in a collective, COLLECTIVE_SECONDS are enough.

The timeouts are far above the delays of a loaded machine, and nothing else is measured. See docs/decisions/021.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

BEAT_SECONDS = 0.5
"""Between two heartbeats of a rank."""
HEARTBEAT_SECONDS = 10.0
"""A rank without a heartbeat for so long is lost."""
LONG_ORDER_SECONDS = 600.0
"""The same while a rank does an order that may hold its interpreter, such as loading weights."""
COLLECTIVE_SECONDS = 30.0
"""A step in which all ranks wait for each other for so long is stalled."""
WARM_UP_SECONDS = 300.0
"""No part of a warm-up step may take longer: it compiles kernels and reads pages of weights for the first time."""


class HeartbeatTimer:
    """When the last heartbeat of a peer came. All times are of time.monotonic().

    allowed_seconds: the silence that the peer announced with its last heartbeat.
    """

    def __init__(self) -> None:
        self.allowed_seconds = HEARTBEAT_SECONDS
        self._heard_at = time.monotonic()

    def restart(self, now: float) -> None:
        """A message of the peer arrived, or this process itself was late and cannot judge the peer."""
        self._heard_at = now

    def expired(self, now: float) -> str | None:
        """The cause of the loss if the peer is silent for longer than allowed, else None."""
        silence = now - self._heard_at
        return f"its interpreter has sent no heartbeat for {silence:.1f} s" if silence > self.allowed_seconds else None


class Phase(IntEnum):
    """What the thread that runs steps does."""

    IDLE = 0
    COMPUTING = 1
    EXCHANGING = 2
    """In a collective: it may wait for other ranks."""


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of a rank at one moment.

    done:      number of the last order that the rank has finished.
    marks:     rises whenever the rank makes progress.
    exchanges: number of collectives that the rank has entered.
    place:     where the rank is, for messages.
    """

    done: int = 0
    marks: int = 0
    exchanges: int = 0
    phase: Phase = Phase.IDLE
    place: str = "no step"

    def to_wire(self) -> list[Any]:
        return [self.done, self.marks, self.exchanges, int(self.phase), self.place]

    @classmethod
    def from_wire(cls, items: list[Any]) -> Report:
        done, marks, exchanges, phase, place = items
        return cls(done, marks, exchanges, Phase(phase), place)


class StepProgress:
    """The progress of this rank's steps: written by the thread that runs them, read by the heartbeat thread."""

    def __init__(self) -> None:
        self.done = 0
        self._marks = 0
        self._exchanges = 0
        self._phase = Phase.IDLE
        self._place: tuple[str, int | None] = ("the begin", None)
        self._order = 0

    def begin(self, order: int) -> None:
        """The step of this order begins."""
        self._order, self._phase = order, Phase.COMPUTING
        self.reach("the begin")

    def reach(self, what: str, number: int | None = None) -> None:
        """The step has come to a place, such as a layer and its number."""
        self._place = what, number
        self._marks += 1

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """The body is a collective."""
        self._exchanges += 1
        self._marks += 1
        self._phase = Phase.EXCHANGING
        yield
        self._phase = Phase.COMPUTING
        self._marks += 1

    def end(self, order: int) -> None:
        """The order is done, a step or another."""
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

    rank:         the rank that the others wait for.
    is_computing: this rank is in its own computation; else all ranks wait in collectives.
    """

    rank: int
    cause: str
    is_computing: bool


def rank_behind(order: int, reports: Mapping[int, Report]) -> int:
    """The rank that the others wait for: not done with `order`, not in a collective, and the fewest collectives."""

    def lateness(rank: int) -> tuple[bool, bool, int]:
        report = reports[rank]
        return report.done >= order, report.phase is Phase.EXCHANGING, report.exchanges

    return min(reports, key=lateness)


class StepWatch:
    """Finds the rank that stalls a step, on rank 0, from the reports of all ranks."""

    def __init__(self, step_timeout_seconds: float) -> None:
        self._step_timeout = step_timeout_seconds
        self._seen: dict[int, Report] = {}
        self._stalled = self._looked_at = 0.0

    def look(self, order: int, reports: Mapping[int, Report], *, now: float, is_warm_up: bool = False) -> Stall | None:
        """Return the stall if no rank has made progress in `order` for as long as its timeout.

        order:   number of the last step that was sent to the ranks.
        reports: by rank.
        now:     of time.monotonic(). The caller looks every BEAT_SECONDS; if it is late, most of the delay is not
                 counted.
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
