"""Policies that execute verbs. They send the signal of the pending operation, start the next operation, or remove
pods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_operator.decision.blockers import Blockers
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.operation import Operation, begin, known, signal_of
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.revisions import Rollout
from megatron_operator.decision.verbs import Reached, Wait, next_step
from megatron_operator.decision.world import World
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import (
    LEGAL_SIGNALS,
    CoordinatorState,
    DesiredState,
    LifecyclePhase,
    ResourceState,
    SignalKind,
)
from megatron_operator.resource.text import seconds_since

RETRY_SECONDS = 5.0
"""Backoff after a failed signal."""

SIGNAL_REASON: dict[SignalKind, Reason] = {
    SignalKind.PAUSE: Reason.PAUSING,
    SignalKind.UNPAUSE: Reason.UNPAUSING,
    SignalKind.SUSPEND: Reason.SUSPENDING,
    SignalKind.RESUME: Reason.RESUMING,
    SignalKind.STOP: Reason.STOPPING,
    SignalKind.DRAIN: Reason.DRAINING,
    SignalKind.UPDATE_WEIGHTS: Reason.REFRESHING_WEIGHTS,
    SignalKind.SET_ADAPTERS: Reason.SETTING_ADAPTERS,
}


def operation_underway(world: World, desired: Desired, blockers: Blockers) -> Verdict | None:
    """Return a verdict that continues the operation in progress, or None if no operation is in progress.

    The verdict sends the signal of the operation, sends it again, or waits for the result.
    """
    operation = desired.operation
    if operation is None or not operation.open or desired.stopped:
        return None
    reason, step = SIGNAL_REASON[operation.signal], _step(operation)
    coordinator = world.coordinator
    if not coordinator.reachable:
        found, on = blockers.coordinator()
        return waiting(found, step, on, requeue_after=desired.overdue_in)
    if known(operation, coordinator):
        confirmed, total = operation.confirmed_ranks or 0, operation.total_ranks
        waits = f"ranks to confirm; {confirmed} of {total} have" if total else "every rank to confirm"
        return waiting(reason, step, waits, requeue_after=desired.overdue_in)
    if operation.signal not in LEGAL_SIGNALS[coordinator.state]:
        on = f"the coordinator to leave the state {coordinator.state.value}"
        return waiting(Reason.SETTLING, step, on, requeue_after=desired.overdue_in)
    sent = replace(operation, phase=LifecyclePhase.SUBMITTED, fence=world.fence)
    signal = signal_of(sent, world, deadline_seconds=_deadline(world, operation.signal))
    on = "every rank to confirm"
    return waiting(reason, step, on, actions=(signal,), requeue_after=desired.overdue_in, operation=sent)


def verb_path(
    world: World, desired: Desired, engines: Engines, observed: Observed, rollout: Rollout, blockers: Blockers
) -> Verdict | None:
    """Return a verdict that takes the next step towards the desired state, or waits for the step to become possible.

    Returns None if the desired state is reached.
    """
    if observed.state is ResourceState.STOPPED or desired.stopped:
        return None
    step = f"reaching {desired.state.value}"
    coordinator = world.coordinator
    if not coordinator.reachable:
        reason, on = blockers.coordinator()
        return waiting(reason, step, on, requeue_after=desired.overdue_in)
    leaving = desired.state is DesiredState.STOPPED or desired.releases_pods
    found = next_step(
        coordinator=coordinator.state,
        engines=[(report.name, report.state) for report in coordinator.engines if report.serving],
        desired=desired.state,
        drained=desired.drained,
        all_draining=rollout.all_draining,
        stopped=desired.stopped,
        engines_expected=not leaving,
    )
    if isinstance(found, Reached):
        return None
    if isinstance(found, Wait):
        if coordinator.state is CoordinatorState.RECOVERING:
            return waiting(Reason.COORDINATOR_RECOVERING, step, found.on, requeue_after=desired.overdue_in)
        if not engines.serving:
            reason, on = blockers.desired_engines()
            return waiting(reason, step, on, requeue_after=desired.overdue_in)
        return waiting(Reason.SETTLING, step, found.on, requeue_after=desired.overdue_in)
    return start(world, desired, found.signal)


def pods_leaving(desired: Desired, engines: Engines) -> Verdict | None:
    """Return a verdict that waits until the engines' pods have terminated, or None if no pods have to be removed.

    The pods are removed if the resource is Stopped, or is Suspended with ReleasePods.
    """
    if not (desired.stopped or (desired.releases_pods and engines.suspended)):
        return None
    left = sorted(pod.name for engine in engines.all for pod in engine.pods)
    if not left and engines.empty:
        return None
    stopping = desired.state is DesiredState.STOPPED
    reason = Reason.STOPPING if stopping else Reason.RELEASING_PODS
    on = f"pods {', '.join(left[:8])} to terminate" if left else "the StatefulSets to be scaled to 0"
    return waiting(reason, "scaling the engines to 0 pods", on)


def start(world: World, desired: Desired, signal: SignalKind, *, engine: str | None = None, **target: Any) -> Verdict:
    """Return the verdict that records a new operation for a signal. The next pass sends the signal.

    If the same signal has just failed, the verdict only waits.
    """
    last = desired.operation
    same = last is not None and (last.signal, last.engine, last.adapters) == (signal, engine, target.get("adapters"))
    if last is not None and last.phase is LifecyclePhase.FAILED and same:
        left = RETRY_SECONDS - seconds_since(last.since, world.now)
        if left > 0:
            on = f"a retry: {last.message}"
            return waiting(Reason.SIGNAL_FAILED, _step(last), on, requeue_after=left)
    operation = replace(begin(world, signal, goal=desired.state, engine=engine), **target)
    on = "the operator to send the signal"
    return waiting(SIGNAL_REASON[signal], _step(operation), on, requeue_after=0.0, operation=operation)


def _step(operation: Operation) -> str:
    if operation.weights is not None:
        return f"{operation.signal.value} to revision {operation.weights}, epoch {operation.epoch}"
    if operation.adapters is not None:
        return f"{operation.signal.value} to spec.model.adapters"
    target = f" {operation.engine}" if operation.engine else ""
    return f"{operation.signal.value}{target} to reach {operation.goal.value}"


def _deadline(world: World, signal: SignalKind) -> float | None:
    spec = world.resource.spec
    if signal is SignalKind.DRAIN:
        return float(spec.lifecycle.drain_seconds)
    if signal in (SignalKind.RESUME, SignalKind.UPDATE_WEIGHTS, SignalKind.SET_ADAPTERS):
        return float(spec.engine.startup_seconds)
    return None
