"""The words of the lifecycle: what a user may want, what engines and coordinators report, what may be said to them.

These are the spellings of the custom resource, the status and the wire; nothing here decides anything.
"""

from __future__ import annotations

from enum import StrEnum


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


class CoordinatorState(StrEnum):
    """What a coordinator reports about itself."""

    RECOVERING = "RECOVERING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    SUSPENDED = "SUSPENDED"
    STOPPING = "STOPPING"


class EngineState(StrEnum):
    """What an engine reports about itself."""

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


class SignalKind(StrEnum):
    """A control signal to a coordinator."""

    PAUSE = "PAUSE"
    UNPAUSE = "UNPAUSE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"
    STOP = "STOP"
    DRAIN = "DRAIN"


class LifecyclePhase(StrEnum):
    """`status.lifecycle.phase`: how far one operation has come."""

    PENDING = "Pending"  # the intent is written, nothing was sent
    SUBMITTED = "Submitted"  # sent at least once; every rank has yet to confirm
    CONFIRMED = "Confirmed"  # every rank confirmed
    UNKNOWN = "Unknown"  # sent, and the coordinator cannot be asked what became of it
    FAILED = "Failed"  # the coordinator answered with an error


class OperationOutcome(StrEnum):
    """What a coordinator remembers of an operation id."""

    IN_PROGRESS = "InProgress"
    CONFIRMED = "Confirmed"
    FAILED = "Failed"


LEGAL_SIGNALS: dict[CoordinatorState, frozenset[SignalKind]] = {
    CoordinatorState.RECOVERING: frozenset(),
    CoordinatorState.RUNNING: frozenset({SignalKind.PAUSE, SignalKind.DRAIN}),
    CoordinatorState.PAUSED: frozenset({SignalKind.UNPAUSE, SignalKind.SUSPEND, SignalKind.STOP, SignalKind.PAUSE}),
    CoordinatorState.SUSPENDED: frozenset({SignalKind.RESUME, SignalKind.STOP, SignalKind.PAUSE}),
    CoordinatorState.STOPPING: frozenset(),
}
"""Signals a coordinator in each state accepts. PAUSE in PAUSED and SUSPENDED succeeds and changes nothing."""

SIGNAL_TARGET: dict[SignalKind, CoordinatorState] = {
    SignalKind.PAUSE: CoordinatorState.PAUSED,
    SignalKind.UNPAUSE: CoordinatorState.RUNNING,
    SignalKind.SUSPEND: CoordinatorState.SUSPENDED,
    SignalKind.RESUME: CoordinatorState.PAUSED,
    SignalKind.STOP: CoordinatorState.RUNNING,
    SignalKind.DRAIN: CoordinatorState.RUNNING,
}
"""The coordinator's state once a signal is confirmed. After STOP it is RUNNING again, for future engines."""
