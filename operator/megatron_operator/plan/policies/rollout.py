"""Policies that roll out a changed spec to the engines. `plan.rollout` chooses the next step; this module has its
messages and actions. While the resource is paused or suspended only engines that do not serve are changed.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState, SignalKind
from megatron_operator.plan.check import check_failed, check_finding, check_ref, present_check, retry_in
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.policies.engines import delete_pods, running
from megatron_operator.plan.policies.lifecycle import start
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.reduce import child_ref
from megatron_operator.plan.rollout import (
    Await,
    Check,
    Drain,
    Finished,
    Halt,
    Prove,
    Recreate,
    Replace,
    Surge,
    next_step,
)
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.upkeep import apply
from megatron_operator.plan.world import Action, AskCanary, CreatePod, DeletePods, EmitEvent, Manifest, VetChild
from megatron_operator.render.check import check_pod
from megatron_operator.render.children import engine_children
from megatron_operator.render.context import manifest_hash
from megatron_operator.render.model_source import model_argument

ASK_AGAIN_SECONDS = 2.0
"""Time after which a canary without a verdict is sent again."""


def _appliable(scene: Scene, engine: EngineView) -> bool:
    manifest = scene.rendered.engine_manifest(engine.index)
    found = engine.statefulset
    usable = found is not None and found.owned and not found.deleting
    return usable and manifest is not None and scene.rendered.rejected(manifest) is None


def _server_rejected(scene: Scene) -> bool:
    server = scene.rendered.server
    return server is not None and scene.rendered.rejected(server) is not None


def _unvetted(scene: Scene, engine: EngineView, *others: Manifest) -> Verdict | None:
    """Test templates in a dry run before an engine is drained for them."""
    manifest = scene.rendered.engine_manifest(engine.index)
    wanted = [*others, manifest] if manifest is not None and engine.stale else others
    for each in wanted:
        action = apply(each)
        if scene.world.vetted.get(action.ref) == action.hash:
            continue
        vet = VetChild(each, action.hash, action.ref)
        on = f"the API server to accept the template of {action.ref.name} in a dry run"
        step = f"rolling out revision {engine.rendered_revision}"
        return waiting(scene, Reason.ROLLING_OUT, step, on, actions=(vet,))
    return None


def _unchecked(scene: Scene, reason: Reason, step: str) -> Verdict | None:
    """Check the desired revision before an engine that serves is drained for it. None: no check is due.

    reason, step: of the rollout; an error of the check has its own reason.
    """
    if not scene.check_due:
        return None
    revision, pod, found = scene.revision, present_check(scene), check_finding(scene)
    reason, why = (found[0], f": {found[1]}") if found is not None else (reason, "")
    if pod is not None and check_failed(scene):
        on = f"a change of the spec; the check of revision {revision} failed, and no engine is replaced{why}"
        return waiting(scene, reason, step, f"{on}; delete the pod to check again")
    if pod is not None and pod.phase == "Failed":
        left = retry_in(scene, pod)
        again = DeletePods("", ((pod.name, pod.uid),), f"the check of revision {revision} is repeated")
        on = f"the next attempt to check revision {revision}{why}"
        return waiting(scene, reason, step, on, actions=(again,) if left <= 0 else (), requeue_after=left)
    ref = check_ref(scene)
    actions: tuple[Action, ...] = ()
    if not scene.check_pods and scene.rendered.just_rejected(ref) is None:  # one pod at a time
        manifest = check_pod(scene.ctx)
        actions = (CreatePod(manifest, manifest_hash(manifest), ref),)
    return waiting(scene, reason, step, f"pod {ref.name} to check revision {revision}{why}", actions=actions)


def _swap(scene: Scene, engine: EngineView, reason: str) -> list[Action]:
    """Apply an engine's new template and replace all its pods together."""
    actions: list[Action] = []
    manifest = scene.rendered.engine_manifest(engine.index)
    if engine.stale and manifest is not None:
        actions.append(apply(manifest))
    deletion = delete_pods(engine, reason)
    return [*actions, deletion] if deletion.pods else actions


def replace_model(scene: Scene) -> Verdict | None:
    """Source, dtype or length changed: drain and replace all engines and servers together, because one model never
    continues the tokens of another."""
    old = [engine for engine in scene.old_model if not engine.surplus and _appliable(scene, engine)]
    server = scene.rendered.server
    if not old or scene.desired is not DesiredState.RUNNING or scene.rollout_paused:
        return None
    if server is None or _server_rejected(scene):
        return None
    serving = [engine for engine in old if engine.serving]
    operation = scene.operation
    over = operation is not None and operation.over(SignalKind.DRAIN)
    step = "replacing the model"
    if serving and (not over or scene.check_due):
        if not running(scene):
            return None
        exists = child_ref(server) in scene.world.children
        unvetted = _unvetted(scene, serving[0], *([server] if exists else []))
        return unvetted or _unchecked(scene, Reason.REPLACING_MODEL, step) or start(scene, SignalKind.DRAIN)
    reason = "the model of the spec changed"
    actions: list[Action] = [apply(server)]
    for engine in old:
        actions += _swap(scene, engine, reason)
    actions.append(EmitEvent("Normal", "ModelReplaced", f"{reason}: replacing {len(old)} engines and the servers"))
    names = ", ".join(engine.name for engine in old[:8])
    verdict = waiting(scene, Reason.REPLACING_MODEL, step, f"{names} to load it", actions=tuple(actions))
    return replace(verdict, operation=None)


def rollout(scene: Scene) -> Verdict | None:
    """Replace engines of another revision than the spec's, as `maxUnavailable` and `maxSurge` allow."""
    engines = [engine for engine in scene.wanted if engine.scaled > 0]
    if any(engine.stale and not _appliable(scene, engine) for engine in engines):
        return None
    if scene.old_model and _server_rejected(scene):
        # The existing OpenAI servers cannot use engines of another model.
        return None
    limits = scene.ctx.spec.rollout
    found = next_step(
        [scene.facts(engine) for engine in engines],
        extras=[scene.facts(engine) for engine in scene.extras],
        max_unavailable=limits.unavailable,
        max_surge=limits.max_surge,
        running=running(scene),
        checked=not scene.check_due,
        paused=limits.paused,
    )
    by_name = {engine.name: engine for engine in (*engines, *scene.extras)}
    step = f"rolling out revision {scene.wanted[0].rendered_revision}" if scene.wanted else "rolling out"
    match found:
        case Check(name):
            return _unvetted(scene, by_name[name]) or _unchecked(scene, Reason.ROLLING_OUT, step)
        case Replace(names):
            return _replaced(scene, [by_name[name] for name in names], step)
        case Recreate(names):
            reason = "its template was applied before its pods were deleted"
            deletions = tuple(delete_pods(by_name[name], reason) for name in names)
            verdict = waiting(scene, Reason.ROLLING_OUT, step, f"{', '.join(names[:8])} to register", actions=deletions)
            return replace(verdict, operation=None)
        case Surge(name):
            return _unvetted(scene, by_name[name]) or _surged(scene, step)
        case Drain(name):
            return _unvetted(scene, by_name[name]) or start(scene, SignalKind.DRAIN, engine=name)
        case Prove(name):
            engine = by_name[name]
            revision = engine.statefulset.revision if engine.statefulset is not None else ""
            asked = AskCanary(name, revision, model_argument(scene.ctx))
            return waiting(
                scene,
                Reason.ROLLING_OUT,
                step,
                f"a canary completion of {name}",
                actions=(asked,),
                requeue_after=ASK_AGAIN_SECONDS,
            )
        case Await(names, what):
            return waiting(scene, Reason.ROLLING_OUT, step, f"{', '.join(names[:8])}: {what}")
        case Halt(name, drain):
            if drain:
                return start(scene, SignalKind.DRAIN, engine=name)
            why = by_name[name].canary_message
            on = f"a change of the spec; {name} gives a wrong answer to its canary: {why}"
            return waiting(scene, Reason.CANARY_FAILED, step, on)
        case Finished():
            return None


def _surged(scene: Scene, step: str) -> Verdict:
    """Add an engine beyond spec.replicas, with the lowest free index."""
    first, most = scene.ctx.spec.replicas, scene.ctx.spec.rollout.max_surge
    present = {engine.index for engine in scene.engines if engine.statefulset is not None or engine.pods}
    index = next((index for index in range(first, first + most) if index not in present), None)
    if index is None:
        return waiting(scene, Reason.ROLLING_OUT, step, "an earlier surge engine to be deleted")
    name = scene.ctx.engine_name(index)
    reason = f"{name} is added until the engines of the previous revision are replaced"
    children = engine_children(scene.ctx, index, pods=scene.ctx.spec.pods_per_engine)
    actions: list[Action] = [*map(apply, children), EmitEvent("Normal", "EngineAdded", reason)]
    return waiting(scene, Reason.ROLLING_OUT, step, f"{name} to register", actions=tuple(actions))


def _replaced(scene: Scene, engines: list[EngineView], step: str) -> Verdict:
    done = sum(engine.scaled > 0 and not engine.stale and not engine.stale_pods for engine in scene.wanted)
    actions: list[Action] = []
    for engine in engines:
        before = engine.statefulset.revision if engine.statefulset is not None else ""
        why = f"{engine.name} goes from revision {before} to {engine.rendered_revision}"
        reason = f"{why} ({done} of {len(scene.wanted)} have it)"
        actions += _swap(scene, engine, reason)
        if engine.stale:
            actions.append(EmitEvent("Normal", "EngineReplaced", reason))
    names = ", ".join(engine.name for engine in engines[:8])
    verdict = waiting(scene, Reason.ROLLING_OUT, step, f"{names} to register", actions=tuple(actions))
    return replace(verdict, operation=None)
