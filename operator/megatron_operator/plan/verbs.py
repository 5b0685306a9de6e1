"""The verb path: from what is observed and what is wanted to the next single legal signal.

A verb is a path over the coordinator's states; this module knows the whole graph and nothing else. Invariants, held by
an exhaustive test: only signals that LEGAL_SIGNALS allows leave here; a signal leaves only while coordinator and
serving engines agree on a steady state; from anywhere the goal is reached by a shortest path.

    RUNNING --PAUSE--> PAUSED --SUSPEND--> SUSPENDED        RUNNING --DRAIN, PAUSE, STOP--> (RUNNING, no engines)
    RUNNING <-UNPAUSE- PAUSED <--RESUME--- SUSPENDED
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_operator.model.states import CoordinatorState, DesiredState, EngineState, SignalKind

C, D, S = CoordinatorState, DesiredState, SignalKind

PATH: dict[tuple[CoordinatorState, DesiredState], SignalKind | None] = {
    (C.RUNNING, D.RUNNING): None,
    (C.RUNNING, D.PAUSED): S.PAUSE,
    (C.RUNNING, D.SUSPENDED): S.PAUSE,
    (C.RUNNING, D.STOPPED): S.PAUSE,
    (C.PAUSED, D.RUNNING): S.UNPAUSE,
    (C.PAUSED, D.PAUSED): None,
    (C.PAUSED, D.SUSPENDED): S.SUSPEND,
    (C.PAUSED, D.STOPPED): S.STOP,
    (C.SUSPENDED, D.RUNNING): S.RESUME,
    (C.SUSPENDED, D.PAUSED): S.RESUME,
    (C.SUSPENDED, D.SUSPENDED): None,
    (C.SUSPENDED, D.STOPPED): S.STOP,
}
"""The next signal from each steady state; None: the goal is reached. `next_step` puts a DRAIN before a STOP."""

AGREEING: dict[CoordinatorState, frozenset[EngineState]] = {
    C.RUNNING: frozenset({EngineState.RUNNING}),
    C.PAUSED: frozenset({EngineState.PAUSED, EngineState.RESUMED}),
    C.SUSPENDED: frozenset({EngineState.SUSPENDED}),
}
"""Engine states that are steady under each steady coordinator state. RESUME lands in PAUSED by way of RESUMED."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this signal."""

    signal: SignalKind


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is between two states; its outcome is the next observation."""

    on: str


@dataclass(frozen=True, slots=True)
class Reached:
    """Coordinator and engines are in the desired state; for Stopped: the engines may lose their pods."""


Step = Send | Wait | Reached


def next_step(
    *,
    coordinator: CoordinatorState,
    engines: Sequence[tuple[str, EngineState]],
    desired: DesiredState,
    drained: bool = False,
    all_draining: bool = False,
    stopped: bool = False,
    engines_expected: bool = True,
) -> Step:
    """The next single step towards `desired`.

    Args:
        engines: name and state of every serving engine.
        drained: a DRAIN of all engines for this goal is over, finished or past its deadline.
        all_draining: all engines were told to drain and nothing undid it; only UNPAUSE does.
        stopped: STOP for this goal is over.
        engines_expected: engine pods exist or are to exist, so that an empty list means that none has registered yet.
    """
    if desired is D.STOPPED and stopped:
        return Reached()
    if coordinator not in AGREEING:
        return Wait(f"the coordinator, which is {coordinator.value}, to settle")
    for name, state in engines:
        if state not in AGREEING[coordinator]:
            return Wait(f"engine {name}, which is {state.value}, to follow its coordinator to {coordinator.value}")
    if coordinator is C.RUNNING and desired is D.RUNNING and all_draining:
        return Send(S.PAUSE)
    if coordinator is C.RUNNING and desired is D.STOPPED and not drained and engines:
        return Send(S.DRAIN)
    signal = PATH[coordinator, desired]
    if signal is None:
        return Reached()
    if coordinator is C.RUNNING and desired is not D.STOPPED and not engines and engines_expected:
        return Wait("the first engine to register")
    return Send(signal)
