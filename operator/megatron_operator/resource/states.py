"""Enumerations of the lifecycle: desired states, reported states, signals.

The protocol defines the states of engines and coordinators and the table of legal signals. All other names belong to
the custom resource and its status.
"""

from __future__ import annotations

from enum import StrEnum

from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import LEGAL_SIGNALS as PROTOCOL_LEGAL_SIGNALS
from megatron_runtime.protocol.lifecycle import TRANSITIONS
from megatron_runtime.protocol.lifecycle import CoordinatorState as CoordinatorState
from megatron_runtime.protocol.lifecycle import EngineState as EngineState


class DesiredState(StrEnum):
    """`spec.desiredState`: the state that the user requests."""

    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"


class ResourceState(StrEnum):
    """`status.state` and `status.lifecycle.observed`: the last observed state of the resource."""

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
    UNKNOWN = "Unknown"  # the coordinator did not answer, so the state of the engines is unknown
    FAILED = "Failed"  # the restart budget of every engine is exhausted


class SignalKind(StrEnum):
    """A control signal to a coordinator."""

    PAUSE = "PAUSE"
    UNPAUSE = "UNPAUSE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"
    STOP = "STOP"
    DRAIN = "DRAIN"
    UPDATE_WEIGHTS = "UPDATE_WEIGHTS"
    SET_ADAPTERS = "SET_ADAPTERS"


class LifecyclePhase(StrEnum):
    """`status.lifecycle.phase`: progress of one operation."""

    PENDING = "Pending"  # the intent is persisted, no signal was sent
    SUBMITTED = "Submitted"  # sent at least once; not every rank has confirmed
    CONFIRMED = "Confirmed"  # every rank confirmed
    UNKNOWN = "Unknown"  # sent, and the coordinator does not answer
    FAILED = "Failed"  # the coordinator answered with an error


class KeyStage(StrEnum):
    """`status.keys.stage`: the stage of a key rotation. It defines the content of `NAME-keys`."""

    SETTLED = "Settled"  # one generation
    ADMITTING = "Admitting"  # both are accepted and the old one is used, until the coordinator accepts the new one
    SWITCHING = "Switching"  # engines and servers use the new one, until none is connected with the old one
    RESTARTING = "Restarting"  # the coordinator is restarted with the new one, until it answers with the new one


class UpdatePhase(StrEnum):
    """`status.update.phase`: how far the custom resource has been updated to the release of its operator."""

    AVAILABLE = "Available"  # not requested
    WAITING = "Waiting"  # requested; the resource does not run, its rollout is paused, or too many other updates run
    RUNNING = "Running"  # coordinator, servers and engines are replaced
    DEFERRED = "Deferred"  # begun; the resource does not run, or its rollout is paused


class OperationOutcome(StrEnum):
    """The state of an operation in the coordinator."""

    IN_PROGRESS = "InProgress"
    CONFIRMED = "Confirmed"
    FAILED = "Failed"


LEGAL_SIGNALS: dict[CoordinatorState, frozenset[SignalKind]] = {
    state: frozenset(kind for kind in SignalKind if state in PROTOCOL_LEGAL_SIGNALS[Header[kind]])
    for state in CoordinatorState
}
"""Signals that a coordinator accepts in each state. PAUSE in PAUSED and SUSPENDED succeeds without an effect."""

SIGNAL_TARGET: dict[SignalKind, CoordinatorState] = {
    kind: TRANSITIONS[Header[kind]].coordinator_after for kind in SignalKind if Header[kind] in TRANSITIONS
} | {SignalKind.DRAIN: CoordinatorState.RUNNING}
"""The coordinator's state after a signal is confirmed. After STOP it is RUNNING again, for new engines."""
