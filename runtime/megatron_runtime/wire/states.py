"""States of engines and coordinators, and the table of legal signals. A state machine is a table, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.wire.headers import Header


class EngineState(StrEnum):
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    UNPAUSING = "UNPAUSING"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    RESUMING = "RESUMING"
    RESUMED = "RESUMED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class CoordinatorState(StrEnum):
    RECOVERING = "RECOVERING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    SUSPENDED = "SUSPENDED"
    STOPPING = "STOPPING"


@dataclass(frozen=True, slots=True)
class Transition:
    """What one signal does. A coordinator in `idempotent_in` answers success and does nothing.

    After `lands_in` is reached, a coordinator goes to `coordinator_after` (STOP: RUNNING again, for future engines).
    """

    legal_from: frozenset[CoordinatorState]
    lands_in: EngineState
    passing: EngineState
    coordinator_after: CoordinatorState
    idempotent_in: frozenset[CoordinatorState] = frozenset()


_C, _E = CoordinatorState, EngineState

TRANSITIONS: dict[Header, Transition] = {
    Header.PAUSE: Transition(
        frozenset({_C.RUNNING}), _E.PAUSED, _E.PAUSING, _C.PAUSED, frozenset({_C.PAUSED, _C.SUSPENDED})
    ),
    Header.UNPAUSE: Transition(frozenset({_C.PAUSED}), _E.RUNNING, _E.UNPAUSING, _C.RUNNING),
    Header.SUSPEND: Transition(frozenset({_C.PAUSED}), _E.SUSPENDED, _E.SUSPENDING, _C.SUSPENDED),
    Header.RESUME: Transition(frozenset({_C.SUSPENDED}), _E.PAUSED, _E.RESUMING, _C.PAUSED),
    Header.STOP: Transition(frozenset({_C.PAUSED, _C.SUSPENDED}), _E.STOPPED, _E.STOPPING, _C.RUNNING),
}
"""Signals by header. RESUME lands in PAUSED: generation starts again only with UNPAUSE."""

PASSING_STATES = frozenset(transition.passing for transition in TRANSITIONS.values())
"""States an engine is in between its acknowledgement and the commit."""
