"""Policies that bring a changed spec to the engines.

Invariants: an engine that serves is drained before its pods go; at most `rollout.maxUnavailable` wanted engines are
not serving on account of a rollout; engines that do not serve anyway go first and cost nothing; while the resource is
paused or suspended only those are touched. Stateless: the next step follows from the revisions that are observed.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState, SignalKind
from megatron_operator.plan.policies.engines import delete_pods, drained, running
from megatron_operator.plan.policies.lifecycle import start
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.scene import EngineView, Scene
from megatron_operator.plan.upkeep import apply
from megatron_operator.plan.world import Action, EmitEvent
from megatron_operator.render.server import server_deployment


def _appliable(scene: Scene, engine: EngineView) -> bool:
    manifest = scene.engine_manifest(engine.index)
    found = engine.statefulset
    usable = found is not None and found.owned and not found.deleting
    return usable and manifest is not None and scene.refused(manifest) is None


def _swap(scene: Scene, engine: EngineView, reason: str) -> list[Action]:
    """Give an engine its new template and replace all its pods together."""
    actions: list[Action] = []
    manifest = scene.engine_manifest(engine.index)
    if engine.stale and manifest is not None:
        actions.append(apply(manifest))
    deletion = delete_pods(engine, reason)
    return [*actions, deletion] if deletion.pods else actions


def replace_model(scene: Scene) -> Verdict | None:
    """Source, dtype or length changed: all engines and servers are drained and swapped together, because tokens of one
    model are never continued by another."""
    old = [engine for engine in scene.old_model if not engine.surplus and _appliable(scene, engine)]
    if not old or scene.desired is not DesiredState.RUNNING:
        return None
    serving = [engine for engine in old if engine.serving]
    operation = scene.operation
    over = operation is not None and operation.over(SignalKind.DRAIN)
    if serving and not over:
        return start(scene, SignalKind.DRAIN) if running(scene) else None
    reason = "the model of the spec changed"
    actions: list[Action] = [apply(server_deployment(scene.ctx))]
    for engine in old:
        actions += _swap(scene, engine, reason)
    actions.append(EmitEvent("Normal", "ModelReplaced", f"{reason}: replacing {len(old)} engines and the servers"))
    names = ", ".join(engine.name for engine in old[:8])
    verdict = waiting(
        scene, Reason.REPLACING_MODEL, "replacing the model", f"{names} to load it", actions=tuple(actions)
    )
    return replace(verdict, operation=None)


def rollout(scene: Scene) -> Verdict | None:
    """Engines whose revision is not the spec's are replaced, `maxUnavailable` at a time."""
    outdated = [engine for engine in scene.wanted if engine.scaled > 0 and (engine.stale or engine.stale_pods)]
    outdated = [engine for engine in outdated if not engine.stale or _appliable(scene, engine)]
    total, done = len(scene.wanted), len(scene.wanted) - len(outdated)
    step = f"rolling out revision {scene.wanted[0].rendered_revision}" if scene.wanted else "rolling out"
    free = [engine for engine in outdated if not engine.serving or not engine.stale]
    if free:
        actions: list[Action] = []
        for engine in free:
            actions += _swap(scene, engine, f"{engine.name} gets the current revision")
        names = ", ".join(engine.name for engine in free[:8])
        if not actions:
            return waiting(scene, Reason.ROLLING_OUT, step, f"the old pods of {names} to end")
        return waiting(scene, Reason.ROLLING_OUT, step, f"{names} to register", actions=tuple(actions))
    if not outdated or not running(scene):
        return None
    unavailable = [engine for engine in scene.wanted if not engine.serving]
    due = next((engine for engine in outdated if drained(scene, engine)), None)
    if due is not None:
        reason = f"{due.name} gets revision {due.rendered_revision} ({done} of {total} have it)"
        events = (EmitEvent("Normal", "EngineReplaced", reason),)
        actions = [*_swap(scene, due, reason), *events]
        verdict = waiting(scene, Reason.ROLLING_OUT, step, f"{due.name} to register", actions=tuple(actions))
        return replace(verdict, operation=None)
    if len(unavailable) >= scene.ctx.spec.rollout.max_unavailable:
        names = ", ".join(engine.name for engine in unavailable[:8])
        return waiting(scene, Reason.ROLLING_OUT, step, f"{names} to register before the next engine is taken")
    return start(scene, SignalKind.DRAIN, engine=outdated[-1].name)
