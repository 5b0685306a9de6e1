"""Upkeep of children. It creates missing children, applies changes and deletes obsolete children.

Upkeep never restarts an engine that has pods. An engine's template changes only in a rollout (`policies.rollout`), or
while the engine has no pods. At other times, missing or changed objects of the engine are rendered from its current
revision.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_operator.decision.actions import (
    Action,
    AdoptKeys,
    ApplyChild,
    CreateKeys,
    DeleteChild,
    DeletePods,
    RotateKeys,
    VetChild,
)
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.ownership import covers
from megatron_operator.decision.rendered import APPS
from megatron_operator.decision.rollout import keeps_revision
from megatron_operator.decision.scene import Scene
from megatron_operator.decision.world import ChildRef, ChildView, Manifest, World, manifest_hash
from megatron_operator.render.children import engine_service
from megatron_operator.render.context import RenderError
from megatron_operator.render.front_door import (
    FRONT_DOOR,
    GATEWAY,
    HTTP_ROUTE,
    INFERENCE,
    INFERENCE_POOL,
    NETWORKING,
)
from megatron_operator.render.guards import engine_policy
from megatron_operator.render.revision import KIND as REVISION_KIND
from megatron_operator.render.revision import revision_child, revision_name
from megatron_operator.resource.names import PREFILL


def _due(scene: Scene, manifest: Manifest) -> bool:
    """Return whether a child must be applied: it may be applied, and it is missing or differs from its manifest."""
    view = scene.world.children.get(ChildRef.of(manifest))
    if not scene.rendered.may_offer(manifest):
        return False
    if view is None:
        return True
    if not view.owned or view.deleting:
        return False
    current = view.hash == manifest_hash(manifest) and (view.verified or covers(view.owned_fields, manifest))
    return not current


def upkeep(scene: Scene) -> list[Action]:
    """Return the actions that apply and delete children. They do not depend on the policy that decides."""
    actions: list[Action] = []
    actions += _keys(scene)
    # Apply these before the shared policies, which allow no connections within an engine.
    extras = scene.rollout.extras
    policies = [
        *scene.rendered.engine_policies,
        *(engine_policy(scene.ctx.of_role(extra.role), extra.index) for extra in extras),
    ]
    actions += [ApplyChild(policy) for policy in policies if _due(scene, policy)]
    shared, _ = scene.rendered.shared
    actions += [ApplyChild(manifest) for manifest in shared if _due(scene, manifest) and _may_apply(scene, manifest)]
    actions += _record_revision(scene)
    for engine in scene.engines.all:
        actions += _engine_upkeep(scene, engine)
    actions += _try_again(scene)
    actions += _leftover_objects(scene)
    return actions + _leftover_config(scene) + _leftover_revisions(scene) + _leftover_checks(scene)


def _keys(scene: Scene) -> list[Action]:
    """Return the actions that create, adopt or repair the keys Secret.

    To repair the Secret, the actions replace keys that cannot be read, make the Secret accept this operator's current
    admin key, and add a trainer's keys.
    """
    name, keys = scene.ctx.keys_name, scene.world.keys
    if not scene.world.settings.security or scene.rendered.just_rejected(ChildRef("Secret", name)) is not None:
        return []
    view = scene.world.children.get(ChildRef("Secret", name))
    if view is None:
        return [CreateKeys(name, scene.keys.first_generation)]
    if view.orphan:
        return [AdoptKeys(name)]
    if keys is None and view.owned and "Secret" not in scene.world.unwatched:
        return [CreateKeys(name, scene.keys.first_generation)]
    has_trainer = scene.world.resource.spec.has_trainer
    if keys is not None and (not keys.admin_admitted or (has_trainer and not keys.has_trainer)):
        return [RotateKeys(name, keys.generation, keys.stage, has_trainer=has_trainer)]
    return []


def _try_again(scene: Scene) -> list[Action]:
    """Return the actions that repeat the dry run of a rejected template, because the cause may be gone."""
    rendered = scene.rendered
    stale = [engine for engine in scene.engines.wanted if engine.stale]
    waiting = [rendered.engine_manifest(engine.index, role=engine.role) for engine in stale]
    if scene.engines.old_model:
        waiting.append(rendered.server)
    for manifest in waiting:
        if manifest is not None and rendered.rejected_by_server(manifest) is not None and rendered.may_offer(manifest):
            return [VetChild(manifest)]
    return []


def _record_revision(scene: Scene) -> list[Action]:
    """Return the action that records the desired revision before any engine gets it. Records never change."""
    try:
        manifest = revision_child(scene.ctx)
    except RenderError:
        return []
    view = scene.world.children.get(ChildRef.of(manifest))
    missing = scene.engines.wanted and (view is None or view.orphan)
    return [ApplyChild(manifest)] if missing and scene.rendered.may_offer(manifest) else []


def _waits_for_servers(scene: Scene, ref: ChildRef) -> bool:
    return scene.rendered.front_door_waits and ref.name == scene.ctx.name and ref.kind in FRONT_DOOR


def _may_apply(scene: Scene, manifest: Manifest) -> bool:
    """Return whether a child may be applied.

    - If a Deployment differs only because this release of the operator renders it differently, the Deployment waits
      until the resource is updated.
    - A server for another model waits until no engine has or gets the old model, and until the check of the new model
      has passed.
    - Of a pair of coordinators, only one is replaced at a time, so the first waits until the second is ready.
    - The objects by which clients reach the servers wait for a ready server that matches the spec.
    """
    ref = ChildRef.of(manifest)
    view, standby = scene.world.children.get(ref), scene.rendered.standby
    if scene.update.holds(manifest, view):
        return False
    if _waits_for_servers(scene, ref):
        return view is None and ref.kind == "Service"
    if view is not None and standby is not None and ref == ChildRef("Deployment", scene.ctx.coordinator_name, APPS):
        second = scene.world.children.get(ChildRef.of(standby))
        return second is not None and second.rolled_out and second.hash == manifest_hash(standby)
    return not scene.rollout.keeps_server(view)


def _engine_upkeep(scene: Scene, engine: EngineView) -> list[Action]:
    service = engine_service(scene.ctx.of_role(engine.role), engine.index)
    found = engine.statefulset
    if engine.surplus and engine.empty:
        return remove_engine(
            scene.world,
            engine,
            reason=f"{engine.name} is not needed: {scene.ctx.spec.count_field(engine.role)} is lower",
        )
    if engine.name in scene.engines.held_back:
        return []
    actions: list[Action] = [ApplyChild(service)] if _due(scene, service) else []
    pods = scene.engines.pods_for(engine)
    if found is not None and (found.deleting or not found.owned):
        return actions
    manifest = _template_of(scene, engine, pods)
    if manifest is None or not scene.rendered.may_offer(manifest):
        return actions
    differs = found is None or found.replicas != manifest["spec"]["replicas"] or _due(scene, manifest)
    if differs:
        return [*actions, ApplyChild(manifest)]
    return [*actions, *_free_to_return(scene, engine)]


def _free_to_return(scene: Scene, engine: EngineView) -> list[Action]:
    """Return the actions that delete unscheduled pods, if they avoid a node that the engine may now use again.

    The StatefulSet creates the pods again, and they can then use the node.
    """
    avoided = {*scene.rendered.avoided(engine.name)}
    pods = [pod for pod in engine.pods if not (pod.node or pod.deleting) and {*pod.avoided.split(",")} - avoided - {""}]
    if not pods:
        return []
    names = tuple((pod.name, pod.uid) for pod in pods)
    return [
        DeletePods(engine.name, names, "no other node had capacity, and the node of the failed GPU may be used again")
    ]


def _template_of(scene: Scene, engine: EngineView, pods: int) -> Manifest | None:
    """Return the StatefulSet of an engine, or None if it must stay unchanged.

    If the engine has the desired revision or has no pods, it gets the template and number of pods of the desired
    revision. Otherwise, or if the desired template is not allowed or cannot be merged, the engine keeps its own
    revision. Special rules apply before the desired revision has passed its check, and while its rollout is paused. In
    these cases, an engine that loses its pods keeps its revision, and an engine that gets pods gets the revision of the
    other engines.
    """
    found = engine.statefulset
    if engine.held and engine.scaled > 0 and pods > 0:
        return scene.rendered.own_manifest(engine, pods=pods)
    if scene.rollout.keeps_former and pods == 0:
        return scene.rendered.own_manifest(engine, pods=0) or _desired(scene, engine, 0)
    if scene.rollout.keeps_former and engine.scaled == 0:
        return scene.rendered.recorded_manifest(engine, scene.rollout.former, pods=pods)
    if engine.rendered_revision == "" or (found is None and pods > 0):
        return scene.rendered.own_manifest(engine, pods=pods) or _desired(scene, engine, pods)
    if keeps_revision(current=not engine.stale, has_pods=engine.scaled > 0, wants_pods=pods > 0):
        return scene.rendered.own_manifest(engine, pods=pods)
    return _desired(scene, engine, pods)


def _desired(scene: Scene, engine: EngineView, pods: int) -> Manifest | None:
    return scene.rendered.engine_manifest(engine.index, role=engine.role, pods=pods)


def remove_engine(world: World, engine: EngineView, *, reason: str) -> list[Action]:
    """Return the deletions of an engine's StatefulSet (with its pods), Service and NetworkPolicy."""
    refs = ChildRef("Service", engine.name), ChildRef("NetworkPolicy", engine.name, NETWORKING)
    return _deletions((engine.statefulset, *(world.children.get(ref) for ref in refs)), reason)


def _deletions(views: Iterable[ChildView | None], reason: str) -> list[Action]:
    """Return the deletions of the children that exist, belong to this resource and are not being deleted."""
    found = (view for view in views if view is not None and view.owned and not view.deleting)
    return [DeleteChild(view.ref, view.uid, reason) for view in found]


def _children(scene: Scene, kind: str) -> list[ChildView]:
    """Return the children of a kind, sorted by name."""
    views = scene.world.children.values()
    return sorted((view for view in views if view.ref.kind == kind), key=lambda view: view.ref.name)


def _leftover_revisions(scene: Scene) -> list[Action]:
    """Return the deletions of recorded revisions that no engine has, will get, or last had."""
    if scene.rendered.template_error is not None:
        return []
    kept = {engine.rendered_revision for engine in scene.engines.all}
    kept |= {engine.statefulset.revision for engine in scene.engines.all if engine.statefulset is not None}
    kept |= {pod.revision for engine in scene.engines.all for pod in engine.pods}
    kept |= {str(entry.get("revision", "")) for entry in scene.world.resource.status.get("engines") or ()}
    kept |= {scene.rollout.former} if scene.rollout.keeps_former else set()
    names = {revision_name(scene.ctx, revision) for revision in kept}
    ours = [view for view in _children(scene, REVISION_KIND) if view.data is not None and scene.engines.wanted]
    return _deletions((view for view in ours if view.ref.name not in names), "no engine is of this revision any more")


def _leftover_objects(scene: Scene) -> list[Action]:
    """Return the deletions of a second coordinator, Ingress, HTTPRoute or InferencePool that the spec no longer has."""
    ctx, server = scene.ctx, scene.ctx.spec.server
    single = "spec.coordinator.replicas is 1"
    objects = (
        (ctx.has_standby, single, ChildRef("Deployment", ctx.standby_name, APPS)),
        (ctx.has_standby, single, ChildRef("Service", ctx.standby_name)),
        (ctx.has_standby, single, ChildRef("PodDisruptionBudget", ctx.coordinator_name, "policy/v1")),
        (
            PREFILL in ctx.roles,
            "spec.engine.roles is absent",
            ChildRef("PodDisruptionBudget", ctx.prefill_name, "policy/v1"),
        ),
        (server.ingress, "spec.server.ingress is absent", ChildRef("Ingress", ctx.name, NETWORKING)),
        (server.http_route, "spec.server.httpRoute is absent", ChildRef(HTTP_ROUTE, ctx.name, GATEWAY)),
        (server.inference_pool, "spec.server.inferencePool is absent", ChildRef(INFERENCE_POOL, ctx.name, INFERENCE)),
    )
    leftover = (
        (scene.world.children.get(ref), reason)
        for wanted, reason, ref in objects
        if not wanted and not _waits_for_servers(scene, ref)
    )
    return [action for view, reason in leftover for action in _deletions([view], reason)]


def _leftover_checks(scene: Scene) -> list[Action]:
    pods = tuple((pod.name, pod.uid) for pod in scene.check.obsolete_pods if not pod.deleting)
    return [DeletePods("", pods, "no rollout waits for its result")] if pods else []


def _leftover_config(scene: Scene) -> list[Action]:
    """Return the deletions of ConfigMaps with earlier contents that no pod uses."""
    changing = scene.update.available or scene.rollout.keeps_former
    changing |= any(engine.stale or engine.stale_pods for engine in scene.engines.all)
    if scene.rendered.template_error is not None or changing:
        return []
    current = {manifest["metadata"]["name"] for manifest in scene.rendered.shared[0] if manifest["kind"] == "ConfigMap"}
    configs = (view for view in _children(scene, "ConfigMap") if view.ref.name.startswith(f"{scene.ctx.name}-config-"))
    return _deletions((view for view in configs if view.ref.name not in current), "no pod uses it any more")
