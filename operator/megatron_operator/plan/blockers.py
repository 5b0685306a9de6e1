"""Causes of a wait for a component, from its pods and from rejected children."""

from __future__ import annotations

from megatron_operator.model.conditions import Finding, Reason
from megatron_operator.model.names import COORDINATOR, ENGINE, SERVER, STANDBY
from megatron_operator.plan.check import check_finding
from megatron_operator.plan.diagnosis import creation_error, first_diagnosis
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.losses import is_lost
from megatron_operator.plan.reduce import child_ref
from megatron_operator.plan.rendered import APPS
from megatron_operator.plan.scene import MAX_STARTING, Scene
from megatron_operator.plan.world import ChildRef


def rejection(scene: Scene, *, name: str | None = None) -> Finding | None:
    """Return the first rejected child, of all or of this name."""
    unrendered = scene.rendered.template_error if name is None else scene.rendered.shared[1].get(name)
    if unrendered is not None:
        return unrendered
    manifests = [*scene.rendered.shared[0], *scene.rendered.engine_policies]
    for engine in scene.engines:
        manifest = scene.rendered.engine_manifest(engine.index, pods=scene.pods_for(engine))
        if manifest is not None:
            manifests.append(manifest)
    for manifest in manifests:
        found = scene.rendered.rejected(manifest)
        if found is not None and name in (None, child_ref(manifest).name):
            return found
    return None


def component_finding(scene: Scene, component: str) -> Finding | None:
    """Return the error of the pods of a coordinator, its standby or the servers, or why none can be created."""
    pods = scene.world.component_pods(component)
    found = first_diagnosis(pods, scene.references)
    if found is not None:
        return found
    ctx = scene.ctx
    names = {COORDINATOR: ctx.coordinator_name, STANDBY: ctx.standby_name, SERVER: ctx.server_name}
    name = names[component]
    view = scene.world.children.get(ChildRef("Deployment", name, APPS))
    failed = view is not None and view.creation_error and not any(pod.ready for pod in pods)
    return creation_error("its pods", view.creation_error, component=component) if view is not None and failed else None


def coordinator_wait(scene: Scene) -> Finding:
    """Return why the coordinator does not answer, as reason and what is waited for."""
    found = rejection(scene, name=scene.ctx.coordinator_name)
    pods = [pod for pod in scene.world.component_pods(COORDINATOR, STANDBY) if not pod.deleting]
    found = found or component_finding(scene, COORDINATOR)
    if found is not None:
        return found[0], f"the coordinator: {found[1]}"
    if any(pod.ready for pod in pods):
        why = f" ({scene.world.coordinator.error})" if scene.world.coordinator.error else ""
        return Reason.COORDINATOR_UNREACHABLE, f"the coordinator to answer{why}"
    return Reason.COORDINATOR_STARTING, "the coordinator's pod to become ready"


def server_wait(scene: Scene) -> Finding | None:
    """Return why no OpenAI server is ready; None if one is."""
    pods = scene.world.component_pods(SERVER)
    if any(pod.ready and not pod.deleting for pod in pods):
        return None
    found = rejection(scene, name=scene.ctx.server_name) or component_finding(scene, SERVER)
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
    found = first_diagnosis(engine.pods, scene.references)
    if found is not None:
        return found
    failed = scene.world.failed_creations.get(engine.name)
    if failed is not None and engine.incomplete:
        return creation_error("its pods", failed, component=ENGINE)
    if engine.report is not None and engine.report.suspect and not any(pod.deleting for pod in engine.pods):
        return Reason.ENGINE_UNRESPONSIVE, f"engine {engine.name} sends no heartbeats; its requests go to other engines"
    if is_lost(scene, engine):
        return Reason.ENGINE_LOST, f"the pods of engine {engine.name} run and it is not registered at its coordinator"
    return None


def absent_engines(scene: Scene) -> list[EngineView]:
    """Return the desired engines that should have pods and do not serve with their revision."""
    return [
        engine for engine in scene.wanted if (engine.superseded or not engine.responsive) and scene.pods_for(engine) > 0
    ]


def engines_wait(scene: Scene) -> Finding:
    """Return why engines that should serve do not, as reason and what is waited for."""
    if scene.rendered.engine_error is not None:
        reason, message = scene.rendered.engine_error
        return reason, f"the engines: {message}"
    absent = absent_engines(scene) or [engine for engine in scene.wanted if not engine.responsive]
    for engine in absent:
        found = engine_finding(scene, engine)
        if found is not None:
            return found[0], f"engine {engine.name}: {found[1]}"
    incomplete = next((engine for engine in absent if engine.incomplete), None)
    if incomplete is not None:
        return Reason.ENGINES_STARTING, f"the StatefulSet of {incomplete.name} to create its pods"
    started = [engine for engine in absent if engine.name not in scene.held_back] or absent
    names = ", ".join(engine.name for engine in started[:8])
    loading = [engine for engine in absent if engine.report is not None and not engine.superseded]
    verb = "load its weights" if loading else "download the model" if scene.downloading else "register"
    later = f"; {len(scene.held_back)} more start then, at most {MAX_STARTING} at a time" if scene.held_back else ""
    return Reason.ENGINES_STARTING, f"{names or 'the engines'} to {verb}{later}"


def weights_finding(scene: Scene) -> Finding | None:
    """Return that engines serve other weights than asked, or different ones."""
    if scene.wrong_weights:
        names = ", ".join(engine.name for engine in scene.wrong_weights[:8])
        return Reason.WRONG_WEIGHTS, f"{names} serve other weights than revision {scene.weights_held}"
    if scene.mixed_weights:
        digests = ", ".join(digest[:12] for digest in scene.mixed_weights[:8])
        text = f"engines of one revision report different digests of their weights: {digests}"
        return Reason.WRONG_WEIGHTS, f"{text}; make the files of the weights equal on all nodes"
    return None


def degradation(scene: Scene) -> Finding | None:
    """Return any error that waiting alone may not resolve."""
    found = rejection(scene)
    if found is not None:
        return found
    for engine in (*scene.wanted, *scene.extras):
        found = engine_finding(scene, engine)
        if found is not None:
            return found
    return (
        weights_finding(scene)
        or component_finding(scene, COORDINATOR)
        or (component_finding(scene, STANDBY) if scene.ctx.has_standby else None)
        or component_finding(scene, SERVER)
        or check_finding(scene)
        or scene.adapters.finding
    )
