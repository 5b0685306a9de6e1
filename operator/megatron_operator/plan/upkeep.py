"""Children that need no decision: what is missing is made, what differs is applied, what is left over is deleted.

An engine's template is the exception: it changes only on its turn in a rollout (`policies.engines`), or while the
engine has no pods. Nothing here restarts an engine that has pods.
"""

from __future__ import annotations

from megatron_operator.plan.reduce import child_ref
from megatron_operator.plan.scene import EngineView, Scene
from megatron_operator.plan.world import Action, ApplyChild, ChildRef, CreateKeys, DeleteChild, Manifest
from megatron_operator.render.context import ANNOTATION_MODEL, manifest_hash
from megatron_operator.render.services import engine_service


def apply(manifest: Manifest) -> ApplyChild:
    return ApplyChild(manifest=manifest, hash=manifest_hash(manifest), ref=child_ref(manifest))


def _due(scene: Scene, manifest: Manifest) -> bool:
    """The child is missing or differs, and applying it is neither refused nor pointless."""
    view = scene.world.children.get(child_ref(manifest))
    if scene.refused(manifest) is not None:
        return False
    if view is None:
        return True
    return view.owned and not view.deleting and (view.hash != manifest_hash(manifest) or not view.verified)


def upkeep(scene: Scene) -> list[Action]:
    """Applies and deletions that are right whatever policy decides."""
    actions: list[Action] = []
    if scene.world.settings.security and ChildRef("Secret", scene.ctx.keys_name) not in scene.world.children:
        actions.append(CreateKeys(scene.ctx.keys_name))
    actions += [
        apply(manifest) for manifest in scene.shared[0] if _due(scene, manifest) and _may_apply(scene, manifest)
    ]
    for engine in scene.engines:
        actions += _engine_upkeep(scene, engine)
    return actions + _leftover_config(scene)


def _may_apply(scene: Scene, manifest: Manifest) -> bool:
    """A server for another model waits until no engine holds the old one: the two are swapped together."""
    if ANNOTATION_MODEL not in manifest["metadata"]["annotations"]:
        return True
    view = scene.world.children.get(child_ref(manifest))
    return view is None or view.model_hash == scene.model_hash or not scene.old_model


def _engine_upkeep(scene: Scene, engine: EngineView) -> list[Action]:
    service = engine_service(scene.ctx, engine.index)
    found = engine.statefulset
    if engine.surplus and engine.empty:
        return remove_engine(scene, engine, reason=f"engine {engine.name} is beyond spec.replicas")
    actions: list[Action] = [apply(service)] if _due(scene, service) else []
    pods = scene.pods_for(engine)
    manifest = scene.engine_manifest(engine.index, pods=pods)
    if manifest is None or scene.refused(manifest) is not None:
        return actions
    if found is None:
        return [*actions, apply(manifest)]
    if found.deleting or not found.owned:
        return actions
    template_is_free = engine.scaled == 0 or pods == 0
    if found.replicas != pods and (template_is_free or not engine.stale):
        return [*actions, apply(manifest)]
    if (template_is_free or not engine.stale) and _due(scene, manifest):
        return [*actions, apply(manifest)]
    return actions


def remove_engine(scene: Scene, engine: EngineView, *, reason: str) -> list[Action]:
    """Delete an engine's StatefulSet (its pods go with it) and Service."""
    actions: list[Action] = []
    service = scene.world.children.get(ChildRef("Service", engine.name))
    for view in (engine.statefulset, service):
        if view is not None and view.owned and not view.deleting:
            actions.append(DeleteChild(view.ref, view.uid, reason))
    return actions


def _leftover_config(scene: Scene) -> list[Action]:
    """ConfigMaps of earlier contents, once no pod can still want one."""
    if any(engine.stale or engine.stale_pods for engine in scene.engines):
        return []
    current = {manifest["metadata"]["name"] for manifest in scene.shared[0] if manifest["kind"] == "ConfigMap"}
    prefix = f"{scene.ctx.name}-config-"
    return [
        DeleteChild(view.ref, view.uid, "no pod uses it any more")
        for ref, view in sorted(scene.world.children.items(), key=lambda item: item[0].name)
        if ref.kind == "ConfigMap" and ref.name.startswith(prefix) and current and ref.name not in current
        if view.owned and not view.deleting
    ]
