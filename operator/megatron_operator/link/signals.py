"""The signals of one link: what was sent and may still be answered, and what was refused at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_operator.link.snapshot import refusal_of
from megatron_operator.model.states import SignalKind
from megatron_operator.plan.world import OperationReport
from megatron_runtime.protocol.messages import ControlAck

REMEMBERED_REFUSALS = 16


@dataclass(slots=True)
class _InFlight:
    signal: SignalKind
    until: float
    asked: int
    """Questions asked before it left; the answer to a later one knows it, if it arrived."""


class SignalBook:
    """By operation id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: dict[str, _InFlight] = {}
        self._refusals: OrderedDict[str, OperationReport] = OrderedDict()

    @property
    def refusals(self) -> Mapping[str, OperationReport]:
        return self._refusals

    def __bool__(self) -> bool:
        """Some answer may still come."""
        return bool(self._in_flight)

    def awaits(self, operation_id: str) -> bool:
        """This signal was sent and its answer may still come."""
        waiting = self._in_flight.get(operation_id)
        return waiting is not None and waiting.until > self._clock()

    def sent(self, operation_id: str, signal: SignalKind, *, seconds: float, asked: int) -> None:
        """It left now, after `asked` questions; in so many seconds its answer is not awaited any more."""
        self._refusals.pop(operation_id, None)
        self._in_flight[operation_id] = _InFlight(signal, self._clock() + seconds, asked)

    def answered(self, ack: ControlAck) -> None:
        waiting = self._in_flight.pop(ack.operation_id, None)
        if waiting is not None and not ack.ok:
            self._refusals[ack.operation_id] = refusal_of(ack, signal=waiting.signal)
            while len(self._refusals) > REMEMBERED_REFUSALS:
                self._refusals.popitem(last=False)

    def drop_overdue(self) -> bool:
        """Whether there was one."""
        now = self._clock()
        return self._drop([key for key, waiting in self._in_flight.items() if waiting.until <= now])

    def drop_lost(self, known: set[str], *, answers: int) -> bool:
        """A signal that was said before the question, and is not in its answer, never arrived: it may be said again.
        Whether there was one."""
        asked = self._in_flight.items()
        return self._drop([key for key, waiting in asked if answers > waiting.asked and key not in known])

    def forget_sent(self) -> None:
        """The connection is another: sent again, the same operation id joins or gets its answer."""
        self._in_flight.clear()

    def _drop(self, keys: list[str]) -> bool:
        for key in keys:
            del self._in_flight[key]
        return bool(keys)
