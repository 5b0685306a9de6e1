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
from megatron_runtime.protocol.lifecycle import NEXT_SIGNAL, STEADY_ENGINE_STATES

C, D, S = CoordinatorState, DesiredState, SignalKind

GOAL: dict[DesiredState, CoordinatorState] = {
    D.RUNNING: C.RUNNING,
    D.PAUSED: C.PAUSED,
    D.SUSPENDED: C.SUSPENDED,
    D.STOPPED: C.STOPPING,
}
"""The coordinator state that each desired state stands for in the protocol's NEXT_SIGNAL."""


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
    if coordinator not in STEADY_ENGINE_STATES:
        return Wait(f"the coordinator, which is {coordinator.value}, to settle")
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
