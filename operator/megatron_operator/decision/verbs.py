"""The path of a verb. Returns the next legal signal on the path from the observed to the desired state.

A verb is a path in the graph of the coordinator's states. An exhaustive test verifies three invariants. All signals are
in LEGAL_SIGNALS. A signal is sent only while the coordinator and all serving engines are in the same settled state. The
desired state is reached from every state by a shortest path.

    RUNNING --PAUSE--> PAUSED --SUSPEND--> SUSPENDED        RUNNING --DRAIN, PAUSE, STOP--> (RUNNING, no engines)
    RUNNING <-UNPAUSE- PAUSED <--RESUME--- SUSPENDED
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_operator.resource.states import CoordinatorState, DesiredState, EngineState, SignalKind
from megatron_runtime.protocol.lifecycle import NEXT_SIGNAL, STEADY_ENGINE_STATES

C, D, S = CoordinatorState, DesiredState, SignalKind

GOAL = {state: C.STOPPING if state is D.STOPPED else C[state.name] for state in D}
"""Coordinator state for each desired state, as the goal of the protocol's NEXT_SIGNAL."""


@dataclass(frozen=True, slots=True)
class Send:
    """Step: send this signal."""

    signal: SignalKind


@dataclass(frozen=True, slots=True)
class Wait:
    """Step: wait, because the coordinator or an engine is changing its state."""

    on: str


@dataclass(frozen=True, slots=True)
class Reached:
    """Step: do nothing, because the coordinator and the engines are in the desired state.

    If this state is Stopped, the engine pods may be removed.
    """


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
    """Return the single next step towards `desired`.

    Args:
        coordinator: state of the coordinator.
        engines: name and state of every serving engine.
        drained: whether a DRAIN of all engines for this goal is complete or past its deadline.
        all_draining: whether a DRAIN of all engines is in effect. Only UNPAUSE ends it.
        stopped: whether STOP for this goal is complete.
        engines_expected: whether engine pods exist or should exist. If so, an empty list `engines` means that no engine
            has registered yet.
    """
    if desired is D.STOPPED and stopped:
        return Reached()
    if coordinator not in STEADY_ENGINE_STATES:
        return Wait(f"the coordinator to leave the state {coordinator.value}")
    for name, state in engines:
        if state not in STEADY_ENGINE_STATES[coordinator]:
            return Wait(f"engine {name}, which is {state.value}, to follow its coordinator to {coordinator.value}")
    if coordinator is C.RUNNING and desired is D.RUNNING and all_draining:
        return Send(S.PAUSE)
    if coordinator is C.RUNNING and desired is D.STOPPED and not drained and engines:
        return Send(S.DRAIN)
    signal = NEXT_SIGNAL.get((coordinator, GOAL[desired]))
    if signal is None:
        return Reached()
    if coordinator is C.RUNNING and desired is not D.STOPPED and not engines and engines_expected:
        return Wait("the first engine to register")
    return Send(S[signal.name])
