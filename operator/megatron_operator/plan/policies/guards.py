"""Policies that block all others, and those of the reached state."""

from __future__ import annotations

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState, ResourceState
from megatron_operator.plan.blockers import engines_wait, rejection, server_wait
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import MAX_FENCE_JUMP
from megatron_runtime.protocol.limits import MAX_FENCE

QUIET = {
    ResourceState.PAUSED: (DesiredState.PAUSED, Reason.PAUSED),
    ResourceState.SUSPENDED: (DesiredState.SUSPENDED, Reason.SUSPENDED),
    ResourceState.STOPPED: (DesiredState.STOPPED, Reason.STOPPED),
}


def deleting(scene: Scene) -> Verdict | None:
    """The resource is being deleted; the garbage collector deletes its children."""
    if not scene.world.resource.deleting:
        return None
    return Verdict(Reason.DELETING, "the resource is being deleted", scene.operation, upkeep=False)


def child_not_owned(scene: Scene) -> Verdict | None:
    """An object with another owner has the name of a child. Nothing is done until one of the two is renamed."""
    ours = {
        scene.ctx.keys_name,
        scene.ctx.coordinator_name,
        scene.ctx.standby_name,
        scene.ctx.server_name,
        scene.ctx.engines_name,
        scene.ctx.name,
    }
    ours |= {engine.name for engine in scene.wanted}
    foreign = sorted(str(ref) for ref, view in scene.world.children.items() if not view.owned and ref.name in ours)
    if not foreign:
        return None
    message = f"{', '.join(foreign)} exists and is not owned by this resource; delete it or rename the resource"
    return Verdict(
        Reason.CHILD_NOT_OWNED,
        message,
        scene.operation,
        step="creating children",
        waiting_on=message,
        upkeep=False,
    )


def restart_budget_exhausted(scene: Scene) -> Verdict | None:
    """The restart budget of every engine is exhausted."""
    if scene.observed is not ResourceState.FAILED:
        return None
    _, on = engines_wait(scene)
    retry_at = min((time for engine in scene.wanted if (time := engine.budget.retry_at)), default=None)
    event = f"the next attempt at {retry_at}" if retry_at else "another spec of the engines or kubectl megatron restart"
    return waiting(scene, Reason.RESTART_BUDGET_EXHAUSTED, "starting engines", f"{event}; {on}")


def stale_fence(scene: Scene) -> Verdict | None:
    """The coordinator reports a fence that no leader can have sent, and would reject every signal."""
    seen, own = scene.world.rejected_fence, scene.world.fence
    if seen is None or scene.stopped:
        return None
    most = min(own + MAX_FENCE_JUMP, MAX_FENCE) - 1
    return waiting(
        scene,
        Reason.STALE_FENCE,
        "checking the fence",
        f"a restart of the coordinator: it reports fence {seen}, this leader's is {own}, at most {most} is accepted; "
        f"delete the pod of {scene.ctx.coordinator_name}, and the engine pods if the fence recurs",
        requeue_after=scene.overdue_in,
    )


def settled_quiet(scene: Scene) -> Verdict | None:
    """The resource is Paused, Suspended or Stopped as requested."""
    found = QUIET.get(scene.observed)
    if found is None or scene.desired is not found[0]:
        return None
    message = {
        ResourceState.PAUSED: "paused: requests in flight are kept, new ones wait",
        ResourceState.SUSPENDED: "suspended: the engines have released their memory",
        ResourceState.STOPPED: "stopped: there are no engine pods",
    }[scene.observed]
    if scene.observed is ResourceState.SUSPENDED and scene.release:
        message = "suspended: the engine pods are removed"
        if scene.ctx.spec.replicas == 0:
            message += ", because spec.replicas is 0"
    deferred = [engine.name for engine in scene.engines if engine.surplus or engine.stale]
    if deferred:
        message += f"; changes to {', '.join(deferred[:8])} wait until it runs"
    left = scene.escalation_in
    requeue = left if left is not None and left > 0 and not scene.release else None
    return Verdict(found[1], message, scene.operation, requeue_after=requeue)


def child_rejected(scene: Scene) -> Verdict | None:
    """A child cannot be rendered or the API server rejects it."""
    found = rejection(scene)
    if found is None:
        return None
    return waiting(scene, found[0], "applying children", f"a corrected spec: {found[1]}", requeue_after=60.0)


def server_not_ready(scene: Scene) -> Verdict | None:
    """No OpenAI server is ready."""
    found = server_wait(scene)
    return None if found is None else waiting(scene, found[0], "starting the front end", found[1])


def settled(scene: Scene) -> Verdict:
    """All components of the spec serve."""
    count = len(scene.wanted)
    noun = "engine serves" if count == 1 else "engines serve"
    message = f"{count} {noun}"
    if scene.woken:
        message += "; woken by a request"
    requeue = max(1.0, scene.idle_in) if scene.woken and scene.idle_in is not None else None
    return Verdict(Reason.SERVING, message, scene.operation, requeue_after=requeue)
