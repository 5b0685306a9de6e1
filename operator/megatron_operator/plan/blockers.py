"""Causes of a wait for a component, from its pods and from rejected children."""

from __future__ import annotations

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import DesiredState
from megatron_operator.plan.causes import CREATION, find_cause
from megatron_operator.plan.check import check_finding
from megatron_operator.plan.diagnosis import first_diagnosis
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.operation import UNSETTLED
from megatron_operator.plan.reduce import child_ref
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import PodView
from megatron_operator.render.context import COORDINATOR, SERVER

Finding = tuple[Reason, str]


def component_pods(scene: Scene, component: str) -> list[PodView]:
    return [pod for pod in scene.world.pods if pod.component == component]


def rejection(scene: Scene, *, name: str | None = None) -> Finding | None:
    """Return the first rejected child, of all or of this name."""
    unrendered = scene.rendered.template_error if name is None else scene.rendered.shared[1].get(name)
    if unrendered is not None:
        return unrendered
    manifests = list(scene.rendered.shared[0])
    for engine in scene.engines:
        manifest = scene.rendered.engine_manifest(engine.index, pods=scene.pods_for(engine))
        if manifest is not None:
            manifests.append(manifest)
    for manifest in manifests:
        found = scene.rendered.rejected(manifest)
        if found is not None and name in (None, child_ref(manifest).name):
            return found
    return None


def coordinator_wait(scene: Scene) -> Finding:
    """Return why the coordinator does not answer, as reason and what is waited for."""
    found = rejection(scene, name=scene.ctx.coordinator_name)
    pods = component_pods(scene, COORDINATOR)
    found = found or first_diagnosis(pods)
    if found is not None:
        return found[0], f"the coordinator: {found[1]}"
    if any(pod.ready for pod in pods):
        why = f" ({scene.world.coordinator.error})" if scene.world.coordinator.error else ""
        return Reason.COORDINATOR_UNREACHABLE, f"the coordinator to answer{why}"
    return Reason.COORDINATOR_STARTING, "the coordinator's pod to become ready"


def server_wait(scene: Scene) -> Finding | None:
    """Return why no OpenAI server is ready; None if one is."""
    pods = component_pods(scene, SERVER)
    if any(pod.ready and not pod.deleting for pod in pods):
        return None
    found = rejection(scene, name=scene.ctx.server_name) or first_diagnosis(pods)
    if found is not None:
        return found[0], f"a front end: {found[1]}"
    return Reason.SERVER_STARTING, "a front end's pod to become ready"


def engine_finding(scene: Scene, engine: EngineView) -> Finding | None:
    """Return the error of one engine; None while it starts or serves."""
    if engine.budget.exhausted is not None:
        return Reason.RESTART_BUDGET_EXHAUSTED, engine.budget.exhausted
    manifest = scene.rendered.engine_manifest(engine.index, pods=scene.pods_for(engine))
    if manifest is not None:
        rejected = scene.rendered.rejected(manifest)
        if rejected is not None:
            return rejected
    found = first_diagnosis(engine.pods)
    if found is not None:
        return found
    failed = scene.world.failed_creations.get(engine.name)
    if failed is not None and not engine.pods and engine.scaled > 0:
        cause = find_cause(failed, CREATION)
        remedy = f"; {cause.remedy}" if cause else ""
        return (cause.reason if cause else Reason.CHILD_REFUSED), f"its pods cannot be created: {failed}{remedy}"
    ready = bool(engine.pods) and all(pod.ready for pod in engine.pods)
    coordinator = scene.world.coordinator
    settled = coordinator.reachable and coordinator.state not in UNSETTLED and scene.desired is not DesiredState.STOPPED
    if ready and settled and engine.report is None:
        return Reason.ENGINE_LOST, f"engine {engine.name} has ready pods and is not registered at its coordinator"
    return None


def absent_engines(scene: Scene) -> list[EngineView]:
    """Return the desired engines that should have pods and do not serve."""
    return [engine for engine in scene.wanted if not engine.serving and scene.pods_for(engine) > 0]


def engines_wait(scene: Scene) -> Finding:
    """Return why engines that should serve do not, as reason and what is waited for."""
    if scene.rendered.engine_error is not None:
        reason, message = scene.rendered.engine_error
        return reason, f"the engines: {message}"
    absent = absent_engines(scene) or [engine for engine in scene.wanted if not engine.serving]
    for engine in absent:
        found = engine_finding(scene, engine)
        if found is not None:
            return found[0], f"engine {engine.name}: {found[1]}"
    bare = next((engine for engine in absent if engine.scaled > 0 and not engine.pods), None)
    if bare is not None:
        return Reason.ENGINES_STARTING, f"the StatefulSet of {bare.name} to create its pods"
    names = ", ".join(engine.name for engine in absent[:8])
    loading = [engine for engine in absent if engine.report is not None]
    verb = "load its weights" if loading else "register"
    return Reason.ENGINES_STARTING, f"{names or 'the engines'} to {verb}"


def degradation(scene: Scene) -> Finding | None:
    """Return any error that waiting alone may not resolve."""
    found = rejection(scene)
    if found is not None:
        return found
    for engine in scene.wanted:
        found = engine_finding(scene, engine)
        if found is not None:
            return found
    found = first_diagnosis([*component_pods(scene, COORDINATOR), *component_pods(scene, SERVER)])
    return found or check_finding(scene)
