"""One operation: a signal whose intent is persisted before it is sent, and whose result survives an operator restart.

    Pending --persisted, then sent--> Submitted --coordinator remembers--> Confirmed | Failed
                                         |  ^
                           unreachable   v  |   reachable again, or sent again with the same id
                                        Unknown

A Pending operation was never sent, so it may be dropped. A Submitted operation is kept while it can still have an
effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from pydantic.alias_generators import to_camel

from megatron_operator.decision.actions import Signal
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.decision.world import World
from megatron_operator.render.model_source import adapters_digest, model_adapters
from megatron_operator.resource.states import (
    LEGAL_SIGNALS,
    SIGNAL_TARGET,
    CoordinatorState,
    DesiredState,
    LifecyclePhase,
    OperationOutcome,
    SignalKind,
)
from megatron_operator.resource.text import stamp
from megatron_runtime.protocol.adapters import Adapter

Phase = LifecyclePhase

REJECTIONS = frozenset({409, 412, 423, 424})
"""Error codes of operations without an effect: illegal in this state, stale fence, another in progress, engines
missing.
"""

UNSETTLED = frozenset({CoordinatorState.RECOVERING, CoordinatorState.STOPPING})


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that `status.lifecycle` records."""

    id: str
    signal: SignalKind
    goal: DesiredState
    fence: int
    phase: LifecyclePhase
    since: str
    engine: str | None = None
    confirmed_ranks: int | None = None
    total_ranks: int | None = None
    message: str | None = None
    weights: str | None = None
    """UPDATE_WEIGHTS: revision of the weights. `source` and `epoch` belong to the same weights."""
    source: str | None = None
    epoch: int | None = None
    adapters: str | None = None
    """SET_ADAPTERS: digest of the list, which is one of adapter_lists() while the signal may be sent."""
    rejected: bool = False
    """Whether the operation failed without an effect."""

    @property
    def open(self) -> bool:
        return self.phase in (Phase.PENDING, Phase.SUBMITTED, Phase.UNKNOWN)

    def over(self, signal: SignalKind, *, engine: str | None = None) -> bool:
        """Return whether the operation is the signal `signal` to `engine`, and has ended without a rejection.

        engine: name of the engine; None for a signal to all engines.
        """
        done = self.phase is Phase.CONFIRMED or (self.phase is Phase.FAILED and not self.rejected)
        return done and self.signal is signal and self.engine == engine

    def to_status(self) -> dict[str, Any]:
        found = {key: getattr(self, name) for name, key in _KEYS.items()}
        values = {key: value.value if isinstance(value, StrEnum) else value for key, value in found.items()}
        return {key: value for key, value in values.items() if value is not None and value is not False}


_KEYS = {field.name: "operationId" if field.name == "id" else to_camel(field.name) for field in fields(Operation)}
"""Key in `status.lifecycle` of each field."""


def from_status(lifecycle: Mapping[str, Any]) -> Operation | None:
    """Return the operation that was persisted last, or None if `status.lifecycle` has no operation."""
    if not lifecycle.get("operationId"):
        return None
    found = {name: lifecycle[key] for name, key in _KEYS.items() if key in lifecycle}
    kinds = {
        "signal": SignalKind(found["signal"]),
        "goal": DesiredState(found["goal"]),
        "phase": LifecyclePhase(found["phase"]),
    }
    return Operation(**{"fence": 0, "since": "", **found, **kinds})


def begin(world: World, signal: SignalKind, *, goal: DesiredState, engine: str | None = None) -> Operation:
    """Return a new operation in phase Pending. The next decision sends its signal, after the operation is persisted."""
    return Operation(
        id=world.new_operation_id,
        signal=signal,
        goal=goal,
        fence=world.fence,
        phase=Phase.PENDING,
        since=stamp(world.now),
        engine=engine,
    )


def resolve(operation: Operation | None, world: World, desired: DesiredState) -> Operation | None:
    """Return the persisted operation, updated from the World.

    Returns None if there is no operation, or if the operation no longer serves the goal `desired`.
    """
    if operation is None:
        return None
    changed_goal = operation.goal is not desired
    if operation.phase is Phase.PENDING:
        other_weights = operation.weights not in (None, world.resource.spec.weights_revision)
        obsolete = (
            changed_goal
            or other_weights
            or _has_other_adapters(operation, world)
            or (
                world.coordinator.reachable
                and world.coordinator.state not in UNSETTLED
                and operation.signal not in LEGAL_SIGNALS[world.coordinator.state]
            )
        )
        return None if obsolete else operation
    if operation.open:
        return _ask(operation, world)
    # A DRAIN of all engines outlives its goal, because the engines get no requests until UNPAUSE.
    drained_all = operation.signal is SignalKind.DRAIN and operation.engine is None
    return None if changed_goal and not drained_all else operation


def adapter_lists(world: World, entries: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Adapter, ...]]:
    """Return the lists of adapters that SET_ADAPTERS may set now, by digest.

    There are two lists. The first is the list of the spec. The second list replaces each adapter that has an error by
    the coordinator's adapter of the same name. If the coordinator has no adapter of this name, the second list omits
    the adapter.

    entries: `status.adapters`.
    """
    failed = {(entry["name"], entry["source"]) for entry in entries if entry.get("error")}
    present = {report.name: Adapter(report.name, report.source) for report in world.coordinator.adapters or ()}
    wanted = model_adapters(world.resource.spec)
    kept = (present.get(each.name) if (each.name, each.source) in failed else each for each in wanted)
    lists = (wanted, tuple(adapter for adapter in kept if adapter is not None))
    return {adapters_digest(adapters): adapters for adapters in lists}


def _has_other_adapters(operation: Operation, world: World) -> bool:
    """Return whether the operation sets a list of adapters that is no longer desired."""
    return operation.adapters is not None and operation.adapters not in _current_lists(world)


def _current_lists(world: World) -> dict[str, tuple[Adapter, ...]]:
    return adapter_lists(world, world.resource.status.get("adapters") or ())


def _ask(operation: Operation, world: World) -> Operation | None:
    coordinator = world.coordinator
    if not coordinator.reachable:
        return replace(operation, phase=Phase.UNKNOWN)
    report = coordinator.operations.get(operation.id)
    if report is None:
        return _forgotten(operation, world)
    ranks = replace(operation, confirmed_ranks=report.confirmed_ranks, total_ranks=report.total_ranks)
    if report.outcome is OperationOutcome.IN_PROGRESS:
        return replace(ranks, phase=Phase.SUBMITTED)
    if report.outcome is OperationOutcome.CONFIRMED:
        return replace(ranks, phase=Phase.CONFIRMED, since=stamp(world.now), message=report.message or None)
    return replace(
        ranks,
        phase=Phase.FAILED,
        since=stamp(world.now),
        message=report.message or "the coordinator gave no reason",
        rejected=report.code in REJECTIONS,
    )


def _forgotten(operation: Operation, world: World) -> Operation | None:
    """Return the new state of an operation whose id the coordinator does not know.

    The coordinator does not know the id if the signal was lost or the coordinator has restarted. Returns None if the
    operation is to be dropped.
    """
    coordinator, now = world.coordinator, stamp(world.now)
    if coordinator.state in UNSETTLED:
        return replace(operation, phase=Phase.UNKNOWN)
    if operation.epoch is not None and coordinator.epoch >= operation.epoch:
        return replace(operation, phase=Phase.CONFIRMED, since=now)
    if _has_other_adapters(operation, world):
        return None
    if operation.signal in LEGAL_SIGNALS[coordinator.state]:
        return replace(operation, phase=Phase.SUBMITTED)
    if operation.signal not in SIGNAL_TARGET:
        return None
    stop_left_engines = operation.signal is SignalKind.STOP and any(e.serving for e in coordinator.engines)
    if coordinator.state is SIGNAL_TARGET[operation.signal] and not stop_left_engines:
        return replace(operation, phase=Phase.CONFIRMED, since=now)
    return None


def known(operation: Operation, coordinator: CoordinatorSnapshot) -> bool:
    """Return whether the coordinator knows the operation, so that its signal need not be sent again."""
    return operation.id in coordinator.operations


def signal_of(operation: Operation, world: World, *, deadline_seconds: float | None) -> Signal:
    return Signal(
        kind=operation.signal,
        operation_id=operation.id,
        fence=world.fence,
        expected_engines=sum(engine.serving for engine in world.coordinator.engines),
        engine=operation.engine,
        source=operation.source,
        epoch=operation.epoch,
        adapters=None if operation.adapters is None else _current_lists(world)[operation.adapters],
        deadline_seconds=deadline_seconds,
    )
