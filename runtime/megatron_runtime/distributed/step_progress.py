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

_STEPS_REMEMBERED = 8
"""Of each size."""


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


class _Paces:
    """The longest that a place in a step has taken, in the last steps of each size: sizes differ by a factor of two.

    Written and read by different threads: what is read is copied in one go.
    """

    def __init__(self) -> None:
        self._of_sizes: dict[tuple[str, int], deque[tuple[float, float]]] = {}

    def note(self, place: str, *, work: float, seconds: float) -> None:
        of_size = self._of_sizes.setdefault((place, int(work).bit_length()), deque(maxlen=_STEPS_REMEMBERED))
        of_size.append((work, seconds))

    def expected(self, place: str, work: float) -> float | None:
        """The longest that `place` may take: in proportion to steps of this size or the next smaller ones, as long as
        the next larger ones where there are none. None where it has not been seen.
        """
        sizes = sorted(size for seen, size in tuple(self._of_sizes) if seen == place)
        if not sizes:
            return None
        size = int(work).bit_length()
        nearest = max((one for one in sizes if one <= size), default=sizes[0])
        found = tuple(self._of_sizes[place, nearest])
        if nearest > size:
            return max(seconds for _, seconds in found)
        return max(seconds / of_work for of_work, seconds in found) * work


class StepProgress:
    """Methods up to end() are called by the thread that runs steps. A mark costs a microsecond; a layer has a few.

    done:      the last order that was done.
    marks:     rises with every mark.
    marked_at: time.monotonic() of the last mark.
    thread_id: of the thread that runs steps, as the operating system counts.
    work:      of the micro-batch under way, in tokens, or what costs as much.
    is_warm_up: of the last step that began: its places may take far longer than those of the steps to come.
    """

    def __init__(self) -> None:
        self.done = 0
        self.marks = 0
        self.marked_at = 0.0
        self.exchanges = 0
        self.phase = Phase.IDLE
        self.thread_id: int | None = None
        self.work = 0.0
        self.is_warm_up = False
        self._what: tuple[str, int | None] = ("", None)
        self._order = 0
        self._slowest: dict[str, float] = {}
        self._paces = _Paces()

    def begin(self, order: int, *, is_warm_up: bool = False) -> None:
        """The step of this order begins, on the calling thread."""
        self.thread_id = threading.get_native_id()
        self.is_warm_up = is_warm_up
        self._order = order
        self._slowest = {}
        self.marked_at = time.monotonic()
        self.phase = Phase.COMPUTING
        self._mark("the begin", None)

    def begin_batch(self, work: float) -> None:
        """A micro-batch of so much work begins."""
        self._mark("the input", None)
        self._note_paces()
        self.work = max(1.0, work)

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
            self._note_paces()

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
        """The longest that this rank may take from one mark to the next where it is, going by the last steps. None
        where it has not been in any.
        """
        return self._paces.expected(self._what[0], self.work)

    def _note_paces(self) -> None:
        """Of the micro-batch that has ended."""
        if self.work:
            for what, seconds in self._slowest.items():
                self._paces.note(what, work=self.work, seconds=seconds)
        self._slowest = {}

    def _mark(self, what: str, number: int | None) -> None:
        now = time.monotonic()
        place = self._what[0]
        self._slowest[place] = max(self._slowest.get(place, 0.0), now - self.marked_at)
        self.marked_at = now
        self._what = what, number
        self.marks += 1
