"""Policies that move the resource along its verb path: send the open operation, start the next, remove pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import (
    LEGAL_SIGNALS,
    CoordinatorState,
    DesiredState,
    LifecyclePhase,
    ResourceState,
    SignalKind,
)
from megatron_operator.model.text import seconds_since
from megatron_operator.plan.blockers import coordinator_wait, engines_wait
from megatron_operator.plan.operation import Operation, begin, known, signal_of
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.verbs import Reached, Wait, next_step
from megatron_operator.plan.world import Signal

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


def _deadline(scene: Scene, signal: SignalKind) -> float | None:
    spec = scene.ctx.spec
    if signal is SignalKind.DRAIN:
        return float(spec.lifecycle.drain_seconds)
    if signal in (SignalKind.RESUME, SignalKind.UPDATE_WEIGHTS, SignalKind.SET_ADAPTERS):
        return float(spec.engine.startup_seconds)
    return None


def _step(operation: Operation) -> str:
    if operation.weights is not None:
        return f"{operation.signal.value} to revision {operation.weights}, epoch {operation.epoch}"
    if operation.adapters is not None:
        return f"{operation.signal.value} to spec.model.adapters"
    target = f" {operation.engine}" if operation.engine else ""
    return f"{operation.signal.value}{target} towards {operation.goal.value}"


def start(scene: Scene, signal: SignalKind, *, engine: str | None = None, **target: Any) -> Verdict:
    """Persist the intent of a signal; the pass that finds it persisted sends it. After a failure of the same signal it
    waits first."""
    last = scene.operation
    same = last is not None and (last.signal, last.engine, last.adapters) == (signal, engine, target.get("adapters"))
    if last is not None and last.phase is LifecyclePhase.FAILED and same:
        left = RETRY_SECONDS - seconds_since(last.since, scene.world.now)
        if left > 0:
            return waiting(
                scene,
                Reason.SIGNAL_FAILED,
                _step(last),
                f"the next attempt: {last.message}",
                requeue_after=left,
            )
    operation = replace(begin(scene.world, signal, goal=scene.desired, engine=engine), **target)
    step = _step(operation)
    return Verdict(
        reason=SIGNAL_REASON[signal],
        message=f"{step}: waiting for the signal to be sent",
        operation=operation,
        step=step,
        waiting_on="the signal to be sent",
        requeue_after=0.0,
    )


def operation_underway(scene: Scene) -> Verdict | None:
    """An operation is in progress: send it, send it again, or wait for its result."""
    operation = scene.operation
    if operation is None or not operation.open or scene.stopped:
        return None
    reason, step = SIGNAL_REASON[operation.signal], _step(operation)
    coordinator = scene.world.coordinator
    if not coordinator.reachable:
        found, on = coordinator_wait(scene)
        return waiting(scene, found, step, on, requeue_after=scene.overdue_in)
    if known(operation, coordinator):
        confirmed, total = operation.confirmed_ranks or 0, operation.total_ranks
        waits = f"ranks to confirm; {confirmed} of {total} have" if total else "every rank to confirm"
        return waiting(scene, reason, step, waits, requeue_after=scene.overdue_in)
    if operation.signal not in LEGAL_SIGNALS[coordinator.state]:
        on = f"the coordinator, which is {coordinator.state.value}, to settle"
        return waiting(scene, Reason.SETTLING, step, on, requeue_after=scene.overdue_in)
    sent = replace(operation, phase=LifecyclePhase.SUBMITTED, fence=scene.world.fence)
    signal = signal_of(sent, scene.world, deadline_seconds=_deadline(scene, operation.signal))
    return replace(
        waiting(scene, reason, step, "every rank to confirm", actions=(signal,), requeue_after=scene.overdue_in),
        operation=sent,
    )


def verb_path(scene: Scene) -> Verdict | None:
    """The desired state is not reached: take the next step of its path."""
    if scene.observed is ResourceState.STOPPED or scene.stopped:
        return None
    step = f"reaching {scene.desired.value}"
    coordinator = scene.world.coordinator
    if not coordinator.reachable:
        reason, on = coordinator_wait(scene)
        return waiting(scene, reason, step, on, requeue_after=scene.overdue_in)
    leaving = scene.desired is DesiredState.STOPPED or scene.release
    found = next_step(
        coordinator=coordinator.state,
        engines=[(report.name, report.state) for report in coordinator.engines if report.serving],
        desired=scene.desired,
        drained=scene.drained,
        all_draining=scene.all_draining,
        stopped=scene.stopped,
        engines_expected=not leaving,
    )
    if isinstance(found, Reached):
        return None
    if isinstance(found, Wait):
        if coordinator.state is CoordinatorState.RECOVERING:
            return waiting(scene, Reason.COORDINATOR_RECOVERING, step, found.on, requeue_after=scene.overdue_in)
        if not scene.serving:
            reason, on = engines_wait(scene)
            return waiting(scene, reason, step, on, requeue_after=scene.overdue_in)
        return waiting(scene, Reason.SETTLING, step, found.on, requeue_after=scene.overdue_in)
    return start(scene, found.signal)


def pods_leaving(scene: Scene) -> Verdict | None:
    """Stopped, or suspended with ReleasePods: the engines' pods terminate."""
    if not (scene.stopped or (scene.release and scene.suspended)):
        return None
    left = sorted(pod.name for engine in scene.engines for pod in engine.pods)
    if not left and scene.engines_empty:
        return None
    stopping = scene.desired is DesiredState.STOPPED
    reason = Reason.STOPPING if stopping else Reason.RELEASING_PODS
    on = f"pods {', '.join(left[:8])} to end" if left else "the StatefulSets to be scaled to 0"
    return waiting(scene, reason, "scaling the engines to 0 pods", on)


def signals(verdict: Verdict) -> tuple[Signal, ...]:
    """Return the signals of a verdict."""
    return tuple(action for action in verdict.actions if isinstance(action, Signal))
