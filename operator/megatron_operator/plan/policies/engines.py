"""Policies for single engines while the resource runs: undo a drain, scale down, wait for missing engines."""

from __future__ import annotations

from dataclasses import replace

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState, ResourceState, SignalKind
from megatron_operator.plan.blockers import absent_engines, engines_wait
from megatron_operator.plan.check import check_failed
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.policies.lifecycle import start
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.rollout import Canary
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.upkeep import remove_engine
from megatron_operator.plan.world import Action, DeletePods, EmitEvent


def running(scene: Scene) -> bool:
    """Return whether single engines may be drained."""
    return scene.desired is DesiredState.RUNNING and scene.observed is ResourceState.RUNNING


def delete_pods(engine: EngineView, reason: str) -> DeletePods:
    pods = tuple((pod.name, pod.uid) for pod in engine.pods if not pod.deleting)
    return DeletePods(owner=engine.name, pods=pods, reason=reason)


def undrain(scene: Scene) -> Verdict | None:
    """An engine was drained for a change that was reverted or paused, or changed to one whose check failed. It gets
    requests again only after a new registration. The coordinator reports a process for some time after its pod ended:
    that of a new pod is not drained."""
    if not running(scene) or scene.all_draining or scene.world.coordinator.drained_all:
        return None
    for engine in scene.wanted:
        idle = engine.serving and engine.report is not None and engine.report.draining
        right = check_failed(scene) or scene.rollout_paused or not (engine.stale or engine.stale_pods)
        if not idle or not right or not engine.whole or engine.superseded:
            continue
        if engine.canary is Canary.FAILED:
            continue
        reason = f"engine {engine.name} was drained and is desired again"
        verdict = waiting(
            scene,
            Reason.ENGINES_STARTING,
            f"restarting {engine.name}",
            f"{engine.name} to register again",
            actions=(delete_pods(engine, reason), EmitEvent("Normal", "EngineRestarted", reason)),
        )
        return replace(verdict, operation=None)
    return None


def scale_down(scene: Scene) -> Verdict | None:
    """Remove engines beyond spec.replicas that no rollout needs: those that do not serve at once, the others one after
    another, highest index first, after their requests have finished."""
    surplus = [engine for engine in scene.engines if engine.surplus and not engine.empty]
    surplus = [engine for engine in surplus if engine not in scene.extras]
    gone = [engine for engine in surplus if engine.statefulset is None or engine.statefulset.deleting]
    present = [engine for engine in surplus if engine not in gone]
    removable = [engine for engine in present if scene.is_drained(engine)]
    if removable and scene.desired is not DesiredState.STOPPED:
        names = ", ".join(engine.name for engine in removable[:8])
        more = f" and {len(removable) - 8} more" if len(removable) > 8 else ""
        reason = f"{names}{more} beyond spec.replicas = {scene.ctx.spec.replicas}"
        actions: list[Action] = []
        for engine in removable:
            actions += remove_engine(scene, engine, reason=f"engine {engine.name} is beyond spec.replicas")
        actions.append(EmitEvent("Normal", "EngineRemoved", reason))
        on = f"{names}{more} to be deleted"
        verdict = waiting(scene, Reason.SCALING_DOWN, "scaling down", on, actions=tuple(actions))
        return replace(verdict, operation=None)
    if present and running(scene):
        return start(scene, SignalKind.DRAIN, engine=present[-1].name)
    if gone:
        names = ", ".join(engine.name for engine in gone)
        return waiting(scene, Reason.SCALING_DOWN, "scaling down", f"the pods of {names} to end")
    return None


def engines_not_serving(scene: Scene) -> Verdict | None:
    """Wait for desired engines that start, load, crash or are lost."""
    failed = [engine for engine in scene.wanted if engine.budget.exhausted is not None]
    if not absent_engines(scene) and not failed:
        return None
    reason, on = engines_wait(scene)
    return waiting(scene, reason, "starting engines", on)
