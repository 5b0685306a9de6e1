"""Control operations: the one under way, those that ended, and where each kind of them is legal."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from megatron_runtime.coordinator.core.clock import Timer
from megatron_runtime.coordinator.core.records import Client, Engine
from megatron_runtime.protocol.headers import PROFILER, ErrorCode, Header
from megatron_runtime.protocol.lifecycle import TRANSITIONS, CoordinatorState
from megatron_runtime.protocol.messages import Control, ControlAck, EngineOutcome, Frames, Operation, pack

REMEMBERED_OPERATIONS = 64

_S = CoordinatorState
LEGAL_STATES: dict[Header, frozenset[CoordinatorState]] = {
    **{signal: transition.legal_from | transition.idempotent_in for signal, transition in TRANSITIONS.items()},
    Header.DRAIN: frozenset({_S.RUNNING}),
    Header.SET_GENERATION_EPOCH: frozenset({_S.RUNNING, _S.PAUSED, _S.SUSPENDED}),
    Header.UPDATE_WEIGHTS: frozenset({_S.RUNNING, _S.PAUSED}),
    **{kind: frozenset({_S.RUNNING, _S.PAUSED, _S.SUSPENDED}) for kind in PROFILER},
}
"""Where each control message is accepted; what stands in no row is refused."""

REQUIRED_FIELDS: dict[Header, tuple[str, ...]] = {
    Header.SET_GENERATION_EPOCH: ("epoch",),
    Header.UPDATE_WEIGHTS: ("epoch", "source"),
}


@dataclass(slots=True, eq=False)
class PendingOperation:
    """An operation whose acknowledgements are being collected.

    askers:  who gets the answer; a second sender of the same id joins.
    waiting: engines that have not answered.
    refused: engines that did not do it and serve on all the same; the operation has then failed.
    """

    control: Control
    operation_id: str
    askers: list[Client]
    waiting: dict[str, Engine] = field(default_factory=dict)
    asked: list[Engine] = field(default_factory=list)
    succeeded: list[Engine] = field(default_factory=list)
    outcomes: dict[str, EngineOutcome] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    total_ranks: int = 0
    timer: Timer | None = None

    @property
    def confirmed_ranks(self) -> int:
        return sum(outcome.ranks for outcome in self.outcomes.values() if outcome.ok)

    def answer(
        self, *, ok: bool, state: CoordinatorState, code: ErrorCode | None = None, error: str | None = None
    ) -> ControlAck:
        return ControlAck(
            operation_id=self.operation_id,
            ok=ok,
            state=state,
            ranks=self.confirmed_ranks,
            total_ranks=self.total_ranks,
            engines=self.outcomes,
            evicted=self.evicted,
            code=int(code) if code is not None else None,
            error=error,
        )

    def describe(self) -> Operation:
        return Operation(
            operation_id=self.operation_id,
            signal=self.control.kind,
            phase="InProgress",
            ranks=self.confirmed_ranks,
            total_ranks=self.total_ranks,
            evicted=self.evicted,
        )


class EndedOperations:
    """The last operations and the answers given, by operation id."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[Control, ControlAck]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def answer_to(self, operation_id: str) -> ControlAck | None:
        known = self._answers.get(operation_id)
        return known[1] if known is not None else None

    def add(self, control: Control, ack: ControlAck) -> None:
        self._answers[ack.operation_id] = (control, ack)
        while len(self._answers) > REMEMBERED_OPERATIONS:
            self._answers.popitem(last=False)

    def describe(self) -> list[Operation]:
        return [_describe(control, ack) for control, ack in self._answers.values()]


def plain_signal(control: Control) -> Frames:
    """A control message as a plain engine knows it."""
    items = [int(control.kind)]
    if control.kind is Header.SET_GENERATION_EPOCH and control.epoch is not None:
        items.append(control.epoch)
    return [pack(items)]


def _describe(control: Control, ack: ControlAck) -> Operation:
    return Operation(
        operation_id=ack.operation_id,
        signal=control.kind,
        phase="Confirmed" if ack.ok else "Failed",
        ranks=ack.ranks,
        total_ranks=ack.total_ranks,
        evicted=ack.evicted,
        code=ack.code,
        error=ack.error,
    )
