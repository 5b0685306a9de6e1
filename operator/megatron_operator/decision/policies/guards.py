"""Policies that prevent all other policies from acting, and policies for a resource that has nothing left to do."""

from __future__ import annotations

from megatron_operator.decision.blockers import Blockers
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.world import MAX_FENCE_JUMP, ChildRef, World
from megatron_operator.render.context import RenderContext, owner_reference
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.names import PREFILL
from megatron_operator.resource.states import ResourceState
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.limits import MAX_FENCE

SECRET = "Secret"
KEYS_SECONDS = 10.0
"""Interval at which keys of another owner are read again, because Secrets are not watched."""
QUIET = {
    ResourceState.PAUSED: (Reason.PAUSED, "paused: open requests are kept, and new requests wait"),
    ResourceState.SUSPENDED: (Reason.SUSPENDED, "suspended: the engines have released their memory"),
    ResourceState.STOPPED: (Reason.STOPPED, "stopped: there are no engine pods"),
}
"""Reason and message for each requested state in which no engine runs."""


def deleting(world: World) -> Verdict | None:
    """Return a verdict without actions while the resource is being deleted, otherwise None.

    The garbage collector deletes the children.
    """
    if not world.resource.deleting:
        return None
    return Verdict(Reason.DELETING, "the resource is being deleted", upkeep=False)


def child_not_owned(world: World, ctx: RenderContext, engines: Engines) -> Verdict | None:
    """Return a verdict without actions while an object with another owner has the name of a child, otherwise None.

    The user must rename the object or the resource.
    """
    ours = {
        ctx.keys_name,
        ctx.coordinator_name,
        ctx.standby_name,
        ctx.server_name,
        ctx.engines_name,
        ctx.name,
    }
    ours |= {engine.name for engine in engines.wanted} | ({ctx.prefill_name} if PREFILL in ctx.roles else set())
    foreign = sorted(str(ref) for ref, view in world.children.items() if not view.owned and ref.name in ours)
    if not foreign:
        return None
    message = f"{', '.join(foreign)} exists and is not owned by this resource; delete it or rename the resource"
    keys = world.children.get(ChildRef(SECRET, ctx.keys_name))
    if keys is not None and keys.orphan and foreign == [str(keys.ref)]:
        owner = json.dumps({"metadata": {"ownerReferences": [owner_reference(ctx)]}}, separators=(",", ":"))
        message = (
            f"{keys.ref} has no owner. If it is from an earlier resource of this name or a backup, adopt it and all "
            f"other children: kubectl patch secret {ctx.keys_name} -n {ctx.namespace} --type merge -p '{owner}'"
        )
    return Verdict(
        Reason.CHILD_NOT_OWNED,
        message,
        step="creating children",
        waiting_on=message,
        requeue_after=KEYS_SECONDS,
        upkeep=False,
    )


def restart_budget_exhausted(observed: Observed, engines: Engines, blockers: Blockers) -> Verdict | None:
    """Return a verdict that waits for a change of the spec or a restart command.

    Returns None unless every engine has exhausted its restart budget.
    """
    if observed.state is not ResourceState.FAILED:
        return None
    _, on = blockers.desired_engines()
    retry_at = min((time for engine in engines.wanted if (time := engine.budget.retry_at)), default=None)
    event = f"the next start at {retry_at}" if retry_at else "another spec of the engines or kubectl megatron restart"
    return waiting(Reason.RESTART_BUDGET_EXHAUSTED, "starting engines", f"{event}; {on}")


def stale_fence(world: World, desired: Desired, ctx: RenderContext) -> Verdict | None:
    """Return a verdict that waits for a restart of the coordinator, if the coordinator reports too high a fence.

    No leader can have sent this fence. Until the restart, the coordinator rejects every signal, because the fence of
    this leader is lower.
    """
    seen, own = world.rejected_fence, world.fence
    if seen is None or desired.stopped:
        return None
    maximum = min(own + MAX_FENCE_JUMP, MAX_FENCE) - 1
    return waiting(
        Reason.STALE_FENCE,
        "checking the fence",
        f"a restart of the coordinator: it reports fence {seen}, at most {maximum} is valid, this leader's is {own}; "
        f"delete the pod of {ctx.coordinator_name}, and the engine pods if the fence recurs",
        requeue_after=desired.overdue_in,
    )


def settled_quiet(world: World, desired: Desired, engines: Engines, observed: Observed) -> Verdict | None:
    """Return a verdict that reports that the resource is Paused, Suspended or Stopped as requested.

    Returns None in any other state.
    """
    found = QUIET.get(observed.state)
    if found is None or desired.state.value != observed.state.value:
        return None
    reason, message = found
    if observed.state is ResourceState.SUSPENDED and desired.releases_pods:
        message = "suspended: the engine pods are removed"
        if world.resource.spec.num_engines == 0:
            fields = dict.fromkeys(map(world.resource.spec.count_field, engines.ctx.roles))
            message += f", because {' and '.join(fields)} {'is' if len(fields) == 1 else 'are'} 0"
    deferred = [engine.name for engine in engines.all if engine.surplus or engine.stale]
    if deferred:
        message += f"; changes to {', '.join(deferred[:8])} wait until it runs"
    left = desired.escalation_in
    requeue = left if left is not None and left > 0 and not desired.releases_pods else None
    return Verdict(reason, message, requeue_after=requeue)


def child_rejected(blockers: Blockers) -> Verdict | None:
    """Return a verdict that reports a child that cannot be rendered or that the API server rejects, or None."""
    found = blockers.rejection()
    if found is None:
        return None
    return waiting(found[0], "applying children", f"a corrected spec: {found[1]}", requeue_after=60.0)


def server_not_ready(blockers: Blockers) -> Verdict | None:
    """Return a verdict that waits for an OpenAI server, or None if a server is ready."""
    found = blockers.server()
    return None if found is None else waiting(found[0], "starting the servers", found[1])


def settled(desired: Desired, engines: Engines) -> Verdict:
    """Return a verdict that reports that all components of the spec serve."""
    count = len(engines.wanted)
    noun = "engine serves" if count == 1 else "engines serve"
    message = f"{count} {noun}"
    if desired.woken:
        message += "; woken by a request"
    requeue = max(1.0, desired.idle_in) if desired.woken and desired.idle_in is not None else None
    return Verdict(Reason.SERVING, message, requeue_after=requeue)
