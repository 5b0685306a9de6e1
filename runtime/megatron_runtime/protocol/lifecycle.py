"""All lifecycle tables: states of engines and coordinators, legal signals, and the paths between states.

The coordinator, the engines and the operator's planner read the same tables (docs/reference/protocol.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.protocol.headers import PROFILER, Header


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
    """The effect of one signal.

    If the coordinator is in a state of `idempotent_in`, it reports success and does nothing. Otherwise each engine goes
    through `passing` to `lands_in`, and the coordinator then enters `coordinator_after`. After STOP, the coordinator
    enters RUNNING, so that engines which join later run.
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
"""The transition of each signal. RESUME leads to PAUSED, because only UNPAUSE starts generation again."""

PASSING_STATES = frozenset(transition.passing for transition in TRANSITIONS.values())
"""States of an engine between its acknowledgement and the commit."""

LEGAL_SIGNALS: dict[Header, frozenset[CoordinatorState]] = {
    **{signal: transition.legal_from | transition.idempotent_in for signal, transition in TRANSITIONS.items()},
    Header.DRAIN: frozenset({_C.RUNNING}),
    Header.UPDATE_WEIGHTS: frozenset({_C.RUNNING, _C.PAUSED}),
    Header.SET_ADAPTERS: frozenset({_C.RUNNING, _C.PAUSED}),
}
"""The coordinator states in which the operator may send each signal."""

NEXT_SIGNAL: dict[tuple[CoordinatorState, CoordinatorState], Header] = {
    (_C.RUNNING, _C.PAUSED): Header.PAUSE,
    (_C.RUNNING, _C.SUSPENDED): Header.PAUSE,
    (_C.RUNNING, _C.STOPPING): Header.PAUSE,
    (_C.PAUSED, _C.RUNNING): Header.UNPAUSE,
    (_C.PAUSED, _C.SUSPENDED): Header.SUSPEND,
    (_C.PAUSED, _C.STOPPING): Header.STOP,
    (_C.SUSPENDED, _C.RUNNING): Header.RESUME,
    (_C.SUSPENDED, _C.PAUSED): Header.RESUME,
    (_C.SUSPENDED, _C.STOPPING): Header.STOP,
}
"""The first signal on the shortest path from one steady state to another. The target STOPPING means that the engines
are to stop.
"""

STEADY_ENGINE_STATES: dict[CoordinatorState, frozenset[EngineState]] = {
    _C.RUNNING: frozenset({_E.RUNNING}),
    _C.PAUSED: frozenset({_E.PAUSED, _E.RESUMED}),
    _C.SUSPENDED: frozenset({_E.SUSPENDED}),
}
"""The engine states that agree with each steady coordinator state. RESUME passes through RESUMED to PAUSED."""

SETTLED_ENGINE_STATE: dict[EngineState, EngineState] = {
    **{transition.passing: transition.lands_in for transition in TRANSITIONS.values()},
    _E.UNPAUSING: _E.PAUSED,  # generation starts with the commit
    _E.RESUMED: _E.PAUSED,
}
"""The state that an engine enters, after it has done the work of a signal, if the commit is lost together with the
coordinator.
"""

ENGINE_LEGAL_FROM: dict[Header, frozenset[EngineState]] = {
    **{
        signal: frozenset(_E(state) for state in LEGAL_SIGNALS[signal])
        for signal in (*TRANSITIONS, Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS)
    },
    **dict.fromkeys(PROFILER, frozenset(_E)),
}
"""The settled engine states in which an engine executes each signal."""


def signals_to_join(state: EngineState, target: CoordinatorState) -> tuple[Header, ...]:
    """Return the signals, in order, that bring a joining engine from `state` to `target`, the coordinator's state.

    Returns an empty tuple if both states already agree, or if `state` or `target` is a transitional state.
    """
    if state.value not in CoordinatorState.__members__ or target not in STEADY_ENGINE_STATES:
        return ()
    reached, signals = CoordinatorState(state.value), []
    while (signal := NEXT_SIGNAL.get((reached, target))) is not None:
        signals.append(signal)
        reached = TRANSITIONS[signal].coordinator_after
    return tuple(signals)
