"""Policies that change weights and adapters of engines without a restart. New weights must be of the same model."""

from __future__ import annotations

from dataclasses import replace

from megatron_operator.decision.adapters import AdapterView
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.policies.engines import delete_pods
from megatron_operator.decision.policies.lifecycle import start
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.weights import WEIGHTS_REPORT_SECONDS, Weights
from megatron_operator.decision.world import World
from megatron_operator.render.context import RenderContext
from megatron_operator.render.model_source import model_argument
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import DesiredState, LifecyclePhase, ResourceState, SignalKind
from megatron_operator.resource.text import seconds_since
from megatron_runtime.protocol.limits import MAX_EPOCH

REFRESHABLE = {state: ResourceState(state.value) for state in (DesiredState.RUNNING, DesiredState.PAUSED)}


def refresh_weights(
    world: World, desired: Desired, ctx: RenderContext, engines: Engines, observed: Observed, weights: Weights
) -> Verdict | None:
    """Return a verdict that updates the weights, or None if no update is due or possible now.

    An update is due if `spec.weights.revision` has changed, or if an engine serves other weights.

    Every engine loads the new weights while it serves, and switches to them between two steps. While the resource is
    suspended or stopped, the update waits.
    """
    due = weights.due
    if due is None or REFRESHABLE.get(desired.state) is not observed.state or engines.old_model:
        return None
    spec = world.resource.spec
    source = model_argument(replace(ctx, spec=spec))
    epoch = max(world.coordinator.epoch, weights.confirmed.epoch) + 1
    if epoch > MAX_EPOCH:
        on = (
            f"a restart of the coordinator and the engines: they report epoch {epoch - 1}, of at most {MAX_EPOCH}; "
            "delete their pods"
        )
        return waiting(Reason.REFRESHING_WEIGHTS, "refreshing weights", on)
    found = weights.finding if due == weights.confirmed.revision else None
    last = desired.operation
    if found is None:
        return start(world, desired, SignalKind.UPDATE_WEIGHTS, weights=due, source=source, epoch=epoch)
    reason, wrong = found
    if last is not None and last.phase is LifecyclePhase.CONFIRMED and last.weights == due:
        left = WEIGHTS_REPORT_SECONDS - seconds_since(last.since, world.now)
        if left > 0:
            on = f"every engine to report revision {due}; {wrong}"
            return waiting(reason, "refreshing weights", on, requeue_after=left)
    verdict = start(world, desired, SignalKind.UPDATE_WEIGHTS, weights=due, source=source, epoch=epoch)
    return replace(verdict, message=f"{verdict.message}; {wrong}")


def wrong_weights(ctx: RenderContext, engines: Engines) -> Verdict | None:
    """Return a verdict that replaces the pods of engines that do not serve and whose pods have obsolete weights.

    Returns None if there are no such pods.
    """
    template = ctx.spec.weights_revision
    found = [
        engine
        for engine in engines.wanted
        if not engine.serving
        and not engine.stale
        and any(pod.weights != template and not pod.deleting for pod in engine.pods)
    ]
    if not found:
        return None
    names = ", ".join(engine.name for engine in found[:8])
    actions = tuple(delete_pods(engine, f"{engine.name} starts with weights {template}") for engine in found)
    on = f"{names} to start with weights {template or 'of the model'}"
    return waiting(Reason.ENGINES_STARTING, "starting engines", on, actions=actions)


def set_adapters(
    world: World, desired: Desired, engines: Engines, observed: Observed, adapters: AdapterView
) -> Verdict | None:
    """Return a verdict that sets the list of adapters, or None if no list must or can be set now.

    The list is set if the engines' list differs from the spec's list, or if an engine lacks an adapter.

    After a failure, the list is set without the adapters that cannot be loaded. The other policies then continue, and
    the whole list is set again later. While the resource is suspended or stopped, a change of the list waits.
    """
    if REFRESHABLE.get(desired.state) is not observed.state or engines.old_model or adapters.due is None:
        return None
    return start(world, desired, SignalKind.SET_ADAPTERS, adapters=adapters.due)
