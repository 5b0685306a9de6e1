"""The words of the lifecycle: what a user may want, what engines and coordinators report, what may be said to them.

The states of engines and coordinators and the table of legal signals are the wire's own; the rest are the spellings
of the custom resource and its status. Nothing here decides anything.
"""

from __future__ import annotations

from enum import StrEnum

from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import LEGAL_SIGNALS as PROTOCOL_LEGAL_SIGNALS
from megatron_runtime.protocol.lifecycle import TRANSITIONS, CoordinatorState, EngineState

__all__ = [
    "LEGAL_SIGNALS",
    "SIGNAL_TARGET",
    "CoordinatorState",
    "DesiredState",
    "EngineState",
    "KeyStage",
    "LifecyclePhase",
    "OperationOutcome",
    "ResourceState",
    "SignalKind",
]


class DesiredState(StrEnum):
    """`spec.desiredState`: the state a user asks for."""

    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"


class ResourceState(StrEnum):
    """`status.state` and `status.lifecycle.observed`: what was last observed of the whole resource."""

    PENDING = "Pending"  # nothing serves yet: children are being created or engines are loading
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    UNPAUSING = "Unpausing"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMING = "Resuming"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    UNKNOWN = "Unknown"  # the coordinator did not answer, so nothing can be claimed about the engines
    FAILED = "Failed"  # the restart budget is spent; a change of the spec starts again


class SignalKind(StrEnum):
    """A control signal to a coordinator."""

    PAUSE = "PAUSE"
    UNPAUSE = "UNPAUSE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"
    STOP = "STOP"
    DRAIN = "DRAIN"
    UPDATE_WEIGHTS = "UPDATE_WEIGHTS"


class LifecyclePhase(StrEnum):
    """`status.lifecycle.phase`: how far one operation has come."""

    PENDING = "Pending"  # the intent is written, nothing was sent
    SUBMITTED = "Submitted"  # sent at least once; every rank has yet to confirm
    CONFIRMED = "Confirmed"  # every rank confirmed
    UNKNOWN = "Unknown"  # sent, and the coordinator cannot be asked what became of it
    FAILED = "Failed"  # the coordinator answered with an error


class KeyStage(StrEnum):
    """`status.keys.stage`: what `NAME-keys` holds during a rotation, and what is waited for before the next stage."""

    SETTLED = "Settled"  # one generation
    ADMITTING = "Admitting"  # two are admitted, the old one is used; until the coordinator admits the new one
    SWITCHING = "Switching"  # engines and servers use the new one; until none of them is connected with the old one
    RESTARTING = "Restarting"  # the coordinator is started anew with the new one; until it answers with it


class OperationOutcome(StrEnum):
    """What a coordinator remembers of an operation id."""

    IN_PROGRESS = "InProgress"
    CONFIRMED = "Confirmed"
    FAILED = "Failed"


LEGAL_SIGNALS: dict[CoordinatorState, frozenset[SignalKind]] = {
    state: frozenset(kind for kind in SignalKind if state in PROTOCOL_LEGAL_SIGNALS[Header[kind]])
    for state in CoordinatorState
}
"""Signals a coordinator in each state accepts. PAUSE in PAUSED and SUSPENDED succeeds and changes nothing."""

SIGNAL_TARGET: dict[SignalKind, CoordinatorState] = {
    kind: TRANSITIONS[Header[kind]].coordinator_after for kind in SignalKind if Header[kind] in TRANSITIONS
} | {SignalKind.DRAIN: CoordinatorState.RUNNING}
"""The coordinator's state once a signal is confirmed. After STOP it is RUNNING again, for future engines."""
