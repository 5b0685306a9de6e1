"""Policies that change weights, to another revision of the same model, and adapters of engines without a restart."""

from __future__ import annotations

from dataclasses import replace

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState, LifecyclePhase, ResourceState, SignalKind
from megatron_operator.model.text import seconds_since
from megatron_operator.plan.blockers import weights_finding
from megatron_operator.plan.policies.engines import delete_pods
from megatron_operator.plan.policies.lifecycle import start
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.scene import WEIGHTS_REPORT_SECONDS, Scene
from megatron_operator.render.model_source import model_argument
from megatron_runtime.protocol.limits import MAX_EPOCH

REFRESHABLE = {
    DesiredState.RUNNING: ResourceState.RUNNING,
    DesiredState.PAUSED: ResourceState.PAUSED,
}


def refresh_weights(scene: Scene) -> Verdict | None:
    """`spec.weights.revision` changed, or an engine serves other weights: every engine loads the weights while it
    serves, and switches to them between two steps. While suspended or stopped the change waits."""
    due = scene.weights_due
    if due is None or REFRESHABLE.get(scene.desired) is not scene.observed or scene.old_model:
        return None
    spec = scene.world.resource.spec
    source = model_argument(replace(scene.ctx, spec=spec))
    epoch = max(scene.world.coordinator.epoch, scene.weights_epoch) + 1
    if epoch > MAX_EPOCH:
        on = (
            f"a restart of the coordinator and the engines: they report epoch {epoch - 1}, of at most {MAX_EPOCH}; "
            "delete their pods"
        )
        return waiting(scene, Reason.REFRESHING_WEIGHTS, "refreshing weights", on)
    found = weights_finding(scene) if due == scene.weights_held else None
    last = scene.operation
    if found is None:
        return start(scene, SignalKind.UPDATE_WEIGHTS, weights=due, source=source, epoch=epoch)
    reason, wrong = found
    if last is not None and last.phase is LifecyclePhase.CONFIRMED and last.weights == due:
        left = WEIGHTS_REPORT_SECONDS - seconds_since(last.since, scene.world.now)
        if left > 0:
            on = f"every engine to report revision {due}; {wrong}"
            return waiting(scene, reason, "refreshing weights", on, requeue_after=left)
    verdict = start(scene, SignalKind.UPDATE_WEIGHTS, weights=due, source=source, epoch=epoch)
    return replace(verdict, message=f"{verdict.message}; {wrong}")


def wrong_weights(scene: Scene) -> Verdict | None:
    """Replace pods that were created with obsolete weights and have never served."""
    template = scene.ctx.spec.weights.revision if scene.ctx.spec.weights else ""
    found = [
        engine
        for engine in scene.wanted
        if not engine.serving
        and not engine.stale
        and any(pod.weights != template and not pod.deleting for pod in engine.pods)
    ]
    if not found:
        return None
    names = ", ".join(engine.name for engine in found[:8])
    actions = tuple(delete_pods(engine, f"{engine.name} starts with weights {template}") for engine in found)
    on = f"{names} to start with weights {template or 'of the model'}"
    return waiting(scene, Reason.ENGINES_STARTING, "starting engines", on, actions=actions)


def set_adapters(scene: Scene) -> Verdict | None:
    """The engines have another list than the spec, or one of them has not loaded an adapter: set the list. After a
    failure the list is set without the adapters that cannot be loaded, the other policies go on, and the whole list is
    set again later. While suspended or stopped a change waits."""
    if REFRESHABLE.get(scene.desired) is not scene.observed or scene.old_model or scene.adapters.due is None:
        return None
    return start(scene, SignalKind.SET_ADAPTERS, adapters=scene.adapters.due)
