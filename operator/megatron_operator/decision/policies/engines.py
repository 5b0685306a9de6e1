"""Policies for single engines while the resource runs. They undo a drain, scale down, or wait for missing engines."""

from __future__ import annotations

from megatron_operator.decision.actions import Action, DeletePods, EmitEvent
from megatron_operator.decision.blockers import Blockers
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.policies.lifecycle import start
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.revisions import RevisionCheck, Rollout
from megatron_operator.decision.rollout import Canary
from megatron_operator.decision.upkeep import remove_engine
from megatron_operator.decision.world import World
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import DesiredState, SignalKind


def delete_pods(engine: EngineView, reason: str) -> DeletePods:
    pods = tuple((pod.name, pod.uid) for pod in engine.pods if not pod.deleting)
    return DeletePods(owner=engine.name, pods=pods, reason=reason)


def _count(engines: Engines, engine: EngineView) -> str:
    """Return the field of the spec that sets the number of engines of this engine's role, with its value."""
    spec = engines.ctx.spec
    return f"{spec.count_field(engine.role)} = {spec.engines_of(engine.role)}"


def undrain(
    world: World, engines: Engines, observed: Observed, rollout: Rollout, check: RevisionCheck
) -> Verdict | None:
    """Return a verdict that returns a drained engine to service by replacing its pods, otherwise None.

    A drained engine is returned to service if the change for which it was drained will not take place now. The change
    may have been reverted or paused, or replaced by a later change whose check failed. The pods are replaced because
    the engine gets requests again only after it has registered again.
    """
    if not observed.running or rollout.all_draining or world.coordinator.drained_all:
        return None
    for engine in engines.wanted:
        idle = engine.serving and engine.report is not None and engine.report.draining
        right = check.failed or rollout.paused or not (engine.stale or engine.stale_pods)
        if not idle or not right or not engine.whole or engine.superseded:
            continue
        if engine.canary is Canary.FAILED:
            continue
        reason = f"engine {engine.name} was drained, but the spec requires it again"
        return waiting(
            Reason.ENGINES_STARTING,
            f"restarting {engine.name}",
            f"{engine.name} to register again",
            actions=(delete_pods(engine, reason), EmitEvent("Normal", "EngineRestarted", reason)),
            operation=None,
        )
    return None


def scale_down(
    world: World, desired: Desired, engines: Engines, observed: Observed, rollout: Rollout
) -> Verdict | None:
    """Return a verdict that removes surplus engines of a role, or None if there are none or a rollout needs them.

    Engines that do not serve are removed immediately. Serving engines are removed one at a time, highest index first,
    after their requests have finished.
    """
    surplus = [engine for engine in engines.all if engine.surplus and not engine.empty]
    surplus = [engine for engine in surplus if engine not in rollout.extras]
    gone = [engine for engine in surplus if engine.statefulset is None or engine.statefulset.deleting]
    present = [engine for engine in surplus if engine not in gone]
    removable = [engine for engine in present if engines.is_drained(engine)]
    if removable and desired.state is not DesiredState.STOPPED:
        names = ", ".join(engine.name for engine in removable[:8])
        more = f" and {len(removable) - 8} more" if len(removable) > 8 else ""
        fields = dict.fromkeys(_count(engines, engine) for engine in removable)
        reason = f"removed {names}{more}, because {' and '.join(fields)}"
        actions: list[Action] = []
        for engine in removable:
            why = f"engine {engine.name} is removed, because {_count(engines, engine)}"
            actions += remove_engine(world, engine, reason=why)
        actions.append(EmitEvent("Normal", "EngineRemoved", reason))
        on = f"{names}{more} to be deleted"
        return waiting(Reason.SCALING_DOWN, "scaling down", on, actions=tuple(actions), operation=None)
    if present and observed.running:
        return start(world, desired, SignalKind.DRAIN, engine=present[-1].name)
    if gone:
        names = ", ".join(engine.name for engine in gone)
        return waiting(Reason.SCALING_DOWN, "scaling down", f"the pods of {names} to terminate")
    return None


def engines_not_serving(engines: Engines, blockers: Blockers) -> Verdict | None:
    """Return a verdict that waits for desired engines that start, load, crash or are lost.

    Returns None if all desired engines serve.
    """
    failed = [engine for engine in engines.wanted if engine.budget.exhausted is not None]
    if not engines.absent and not failed:
        return None
    reason, on = blockers.desired_engines()
    return waiting(reason, "starting engines", on)
