"""How far the steps of a rank have come: written by the thread that runs them, read by one that watches. No torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_STEPS_REMEMBERED = 32


class Phase(IntEnum):
    """What the thread of steps does."""

    IDLE = 0
    COMPUTING = 1
    EXCHANGING = 2
    """It may wait for others."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank at one moment.

    done:      the last order that it has done.
    signs:     rises whenever it gets on.
    exchanges: how many exchanges with others it has entered.
    place:     where it is, in words.
    """

    done: int = 0
    signs: int = 0
    exchanges: int = 0
    phase: Phase = Phase.IDLE
    place: str = "no step"

    def to_wire(self) -> list[Any]:
        return [self.done, self.signs, self.exchanges, int(self.phase), self.place]

    @classmethod
    def from_wire(cls, items: list[Any]) -> Report:
        done, signs, exchanges, phase, place = items
        return cls(done, signs, exchanges, Phase(phase), place)


class StepProgress:
    """Methods up to end() are called by the thread that runs steps. A mark costs a microsecond; a layer has a few.

    done:      the last order that was done.
    marks:     rises with every mark.
    marked_at: time.monotonic() of the last mark.
    thread_id: of the thread that runs steps, as the operating system counts.
    work:      of the micro-batch under way, in tokens, or what costs as much.
    """

    def __init__(self) -> None:
        self.done = 0
        self.marks = 0
        self.marked_at = 0.0
        self.exchanges = 0
        self.phase = Phase.IDLE
        self.thread_id: int | None = None
        self.work = 0.0
        self._what: tuple[str, int | None] = ("", None)
        self._order = 0
        self._slowest = 0.0
        self._paces: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def begin(self, order: int) -> None:
        """The step of this order begins, on the calling thread."""
        self.thread_id = threading.get_native_id()
        self._order = order
        self._slowest = 0.0
        self.marked_at = time.monotonic()
        self.phase = Phase.COMPUTING
        self._mark("the begin", None)

    def begin_batch(self, work: float) -> None:
        """A micro-batch of so much work begins."""
        self.work = max(1.0, work)
        self._mark("the input", None)

    def reach(self, what: str, number: int | None = None) -> None:
        """What comes now, such as a layer and its number."""
        self._mark(what, number)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Others take part in what happens inside."""
        self.exchanges += 1
        self._mark(*self._what)
        self.phase = Phase.EXCHANGING
        yield
        self.marked_at = time.monotonic()  # what others took is not this rank's pace
        self.phase = Phase.COMPUTING
        self._mark(*self._what)

    def end(self, order: int) -> None:
        """The order is done, a step or another."""
        self.done = order
        if self.phase is not Phase.IDLE:
            self._mark("the end", None)
            self.phase = Phase.IDLE
            if self.work:
                self._paces.append(self._slowest / self.work)

    def place(self) -> str:
        """In words."""
        if self.phase is Phase.IDLE:
            return "no step"
        what, number = self._what
        where = what if number is None else f"{what} {number}"
        if self.phase is Phase.EXCHANGING:
            where = f"exchange {self.exchanges}, of {where},"
        return f"{where} of step {self._order}"

    def expected_seconds(self) -> float | None:
        """The longest that this rank may take from one mark to the next, going by the last steps. None before any."""
        paces = tuple(self._paces)
        return max(paces) * self.work if paces else None

    def _mark(self, what: str, number: int | None) -> None:
        now = time.monotonic()
        self._slowest = max(self._slowest, now - self.marked_at)
        self.marked_at = now
        self._what = what, number
        self.marks += 1
